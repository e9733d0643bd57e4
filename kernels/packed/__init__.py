"""Weights of packed integers, and their products."""
