"""Triton kernels for NVIDIA GPUs. What calls them is in `penstock.kernels`, with the checks."""
