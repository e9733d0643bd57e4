"""Measuring tools: checkpoints with random weights."""
