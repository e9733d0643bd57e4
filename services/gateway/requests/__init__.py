"""The life of requests: admission, routing, work for tokenizers, output, failures and the end."""
