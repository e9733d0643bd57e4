"""Sampling, penalties and logprobs."""
