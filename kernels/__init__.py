"""Attention, cache and sampling kernels, each with a torch reference."""
