"""Pallas kernels of the decoder: attention to a cache, experts, rotary positions."""
