"""Offline inference: `LLM` and its outputs."""
