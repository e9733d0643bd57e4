"""A model inside a program, without a server: `python examples/offline.py [MODEL]`."""

import sys

from penstock import LLM, SamplingParams


def main() -> None:
    """Print answers to prompts and to a conversation."""
    params = SamplingParams(max_tokens=64, temperature=0)
    with LLM(sys.argv[1] if len(sys.argv) > 1 else "") as llm:
        for output in llm.generate(["17+25=", "count from 3 to 9"], params, use_tqdm=False):
            print(output.prompt, output.outputs[0].text)
        conversation = [{"role": "user", "content": "reverse: penstock"}]
        print(llm.chat(conversation, params, use_tqdm=False)[0].outputs[0].text)


if __name__ == "__main__":
    main()
