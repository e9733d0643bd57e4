"""Decoder layers compiled for the CPU at hand, at the start of a process."""
