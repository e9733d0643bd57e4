"""The worker: the weights, KV cache and forward pass of one tensor-parallel rank."""
