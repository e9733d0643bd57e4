"""Answers that match a JSON schema, a regex and a list of choices.

Run `launch all`, then `python examples/structured.py [ENDPOINT]`. The demo model can only add,
count, reverse and repeat, so it repeats the object; ask another model for one in your own words.
"""

import json
import sys

from penstock import Client

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "population": {"type": "integer"}},
    "required": ["city", "population"],
    "additionalProperties": False,
}


def main() -> None:
    """Print one answer of each kind."""
    endpoint = sys.argv[1] if len(sys.argv) > 1 else "tcp://127.0.0.1:5555"
    with Client(endpoint) as client:

        def answer(question: str, **constraint: object) -> str:
            text: str = client.generate(
                messages=[{"role": "user", "content": question}],
                structured_outputs=constraint,
                max_tokens=64,
                temperature=0,
            ).text
            return text

        question = 'repeat: {"city": "Paris", "population": 2102650}'
        print(json.loads(answer(question, json=SCHEMA)))
        print(answer("count from 3 to 9", regex="[0-9]( [0-9])*"))
        print(answer("17+25=", choice=["41", "42", "43"]))


if __name__ == "__main__":
    main()
