"""The device, and what it can compute: types, compiled layers, deterministic products."""
