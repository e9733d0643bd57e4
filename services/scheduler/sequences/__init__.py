"""Sequences: requests as growing lists of tokens, and guesses of their next tokens."""
