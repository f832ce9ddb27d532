"""Backends of the head: XLA's loops anywhere, Pallas kernels on Hopper; the choice."""
