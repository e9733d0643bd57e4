"""Qwen3, its parallel layers and its weights."""
