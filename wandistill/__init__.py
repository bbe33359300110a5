"""Distil a Wan 2.x text-to-video teacher into a small text-to-image student."""

__version__ = "0.1.0"
