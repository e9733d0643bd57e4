"""The life of requests: work for tokenizers, output, failures and the end."""
