"""Measurements of kernels on a GPU, by which `launch tune` chooses tile sizes."""
