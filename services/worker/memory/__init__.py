"""The memory of a rank: KV cache, host and folder tiers, and persistent memory."""
