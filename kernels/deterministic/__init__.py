"""Kernels for GPUs whose rows have the same bits in every batch."""
