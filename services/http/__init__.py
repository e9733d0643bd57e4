"""OpenAI's API, metrics and a page: HTTP processes, which are clients of the gateway."""
