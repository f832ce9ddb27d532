"""What runs a call: XLA's loops anywhere, Pallas kernels on Hopper; and the choice."""
