"""The tokenizer, but a skull in a prompt kills it, and a snail keeps it for seconds."""

import os
import signal
import time

from penstock.protocol.messages.pipeline import TokenizeRequest
from penstock.services.tokenizer import prompts
from penstock.services.tokenizer.__main__ import main

SECONDS = 3.0
encode = prompts.Tokenizer.encode


def encode_or_die(self: prompts.Tokenizer, request: TokenizeRequest) -> list[int]:
    if "☠" in str(request.prompt):
        os.kill(os.getpid(), signal.SIGKILL)
    if "🐌" in str(request.prompt):
        time.sleep(SECONDS)
    return encode(self, request)


if __name__ == "__main__":
    prompts.Tokenizer.encode = encode_or_die  # type: ignore[method-assign]
    main()
