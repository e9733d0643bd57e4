"""The detokenizer, but the text of a request whose id begins with `poison` kills it."""

import os
import signal
from typing import Any

from penstock.protocol.messages.pipeline import StepTokens
from penstock.services.detokenizer import process
from penstock.services.detokenizer.__main__ import main

handle = process.Detokenizer.handle


def handle_or_die(self: process.Detokenizer, message: StepTokens) -> Any:
    if any(opened.request_id.startswith("poison") for opened in message.opened):
        os.kill(os.getpid(), signal.SIGKILL)
    return handle(self, message)


if __name__ == "__main__":
    process.Detokenizer.handle = handle_or_die  # type: ignore[method-assign]
    main()
