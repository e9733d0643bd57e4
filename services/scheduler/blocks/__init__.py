"""KV blocks: block tables, the pool with its prefix cache, host and folder tiers, and records."""
