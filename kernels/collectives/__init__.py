"""All-reduce over NVLink."""
