"""The scheduler: sequences, blocks, and the plans in flight."""
