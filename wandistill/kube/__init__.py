"""Kubernetes: a values file becomes checked settings, sizes from the planner, and PyTorchJobs. No torch."""
