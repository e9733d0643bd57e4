"""Memory of a rank: KV cache, host and folder tiers, and what outlives the worker."""
