"""Attention, cache and sampling kernels, each with a reference in torch."""
