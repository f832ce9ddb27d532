"""Kernels that are written by hand, one backend a kind of device."""
