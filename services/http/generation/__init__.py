"""OpenAI's chats and completions, on which the Responses and Messages APIs are built."""
