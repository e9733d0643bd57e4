"""Quantization to fp8."""
