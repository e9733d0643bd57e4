"""Paged attention and the KV cache."""
