"""A function call, its result, and the final answer, with the `openai` client.

Run `launch all`, then `python examples/tools.py`. The demo model can only add, count, reverse and
repeat, so it repeats the call; ask another model "What is 17 + 25?". Environment: as in
openai_client.py.
"""

import json
import os

from openai import OpenAI

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "minimum": 0, "maximum": 999},
                "b": {"type": "integer", "minimum": 0, "maximum": 999},
            },
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
QUESTION = """\
repeat: <tool_call>
{"name": "add", "arguments": {"a": 17, "b": 25}}
</tool_call>"""


def main() -> None:
    """Print the call and the answer that follows its result."""
    client = OpenAI(
        base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
    )
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": QUESTION}]
    reply = client.chat.completions.create(
        model=model, messages=messages, tools=[ADD], temperature=0, max_tokens=200
    )
    message = reply.choices[0].message
    call = message.tool_calls[0]
    arguments = json.loads(call.function.arguments)
    print(f"{call.function.name}({arguments['a']}, {arguments['b']})")

    result = f"repeat: {arguments['a']} + {arguments['b']} = {arguments['a'] + arguments['b']}"
    messages += [
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": result},
    ]
    final = client.chat.completions.create(
        model=model, messages=messages, tools=[ADD], temperature=0, max_tokens=64
    )
    print(final.choices[0].message.content)


if __name__ == "__main__":
    main()
