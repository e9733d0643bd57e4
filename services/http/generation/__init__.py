"""OpenAI's chats and completions, which the Responses and Messages APIs build upon."""
