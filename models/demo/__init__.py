"""The demo model: a Qwen3 of four million parameters whose answers can be checked.

`tasks` says what it can do and what the right answers are, `checkpoint/` holds the weights,
and `train` made them.
"""
