"""The tokenizer: prompts and conversations to token ids."""
