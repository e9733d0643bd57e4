"""Tensors shared by kernels of several folders: shapes, types and meanings."""
