"""Embeddings, reranking and scores: OpenAI's, Jina's, Cohere's and vLLM's forms."""
