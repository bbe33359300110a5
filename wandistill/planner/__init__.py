"""What a run needs in memory and time, from numbers alone: no torch, no device, nothing measured here."""
