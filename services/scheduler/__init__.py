"""The scheduler: continuous batching, KV blocks, workers and streams to detokenizers."""
