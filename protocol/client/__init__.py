"""Clients of a pipeline: `Client`, `AsyncClient`, and the exceptions they raise."""
