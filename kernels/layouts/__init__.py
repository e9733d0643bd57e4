"""Tensors that kernels of several folders share: shapes, types and meanings."""
