"""A conversation over HTTP with the `openai` client.

Run `launch all`, then `python examples/openai_client.py`. Environment: OPENAI_BASE_URL
(default: http://127.0.0.1:8000/v1), and OPENAI_API_KEY where the server has a key.
"""

import os

from openai import OpenAI


def main() -> None:
    """Print an answer, and then one that is streamed."""
    client = OpenAI(
        base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
    )
    model = client.models.list().data[0].id
    reply = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "17+25="}]
    )
    print(reply.choices[0].message.content)

    stream = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "count from 3 to 9"}], stream=True
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
