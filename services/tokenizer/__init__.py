"""The tokenizer, which encodes prompts and conversations as token ids."""
