"""Answers that match a JSON schema, a regex and a list of choices.

Run `launch all`, then `python examples/structured.py [ENDPOINT]`.
"""

import json
import sys

from penstock import Client

SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["sum"],
    "additionalProperties": False,
}


def main() -> None:
    """Print one answer of each kind."""
    endpoint = sys.argv[1] if len(sys.argv) > 1 else "tcp://127.0.0.1:5555"
    with Client(endpoint) as client:

        def answer(**constraint: object) -> str:
            text: str = client.generate(
                messages=[{"role": "user", "content": "17+25="}],
                structured_outputs=constraint,
                max_tokens=64,
                temperature=0,
            ).text
            return text

        print(json.loads(answer(json=SCHEMA)))
        print(answer(regex="[0-9]{2}"))
        print(answer(choice=["41", "42", "43"]))


if __name__ == "__main__":
    main()
