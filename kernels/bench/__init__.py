"""Benchmarks of single kernels: `python -m penstock.kernels.bench.<name>`, on a GPU."""
