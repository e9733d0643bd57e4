"""Elementwise operations, normalization and rotary embedding."""
