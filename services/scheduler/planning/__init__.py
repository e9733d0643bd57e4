"""The policy: the sequences of each step, and the plans in flight."""
