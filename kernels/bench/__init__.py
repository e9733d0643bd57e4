"""Measurements of kernels on a GPU, with which `launch tune` chooses tile sizes."""
