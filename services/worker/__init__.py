"""The worker: weights, the KV cache and the forward pass of one tensor-parallel rank."""
