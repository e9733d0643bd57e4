"""Logits: changes by slot, masks of grammars, sampling, logprobs and pooled results."""
