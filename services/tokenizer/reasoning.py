"""Where an answer begins: in reasoning, perhaps with reasoning, or with itself."""

from penstock.protocol.messages.structured import Reasoning

OPEN, CLOSE = "<think>", "</think>"
_TURN, _END_OF_TURN = "<|im_start|>assistant\n", "<|im_end|>"
SWITCH = "enable_thinking"
"""what a template names whose model opens `<think>` itself, unless the prompt has an empty one"""


def reasoning_after(prompt: str, opens_itself: bool) -> Reasoning:
    """Where the answer to `prompt` begins.

    "open": the prompt ends with `<think>`, or the assistant's turn, which it has begun, ends within
    a thought. What else a prompt says about the tag does not matter: it may be a user's.
    "optional": the prompt ends where the turn begins, and the model `opens_itself`.
    """
    _, begun, turn = prompt.rpartition(_TURN)
    if not begun or _END_OF_TURN in turn:
        return "open" if prompt.rstrip().endswith(OPEN) else "none"
    if turn.rfind(OPEN) > turn.rfind(CLOSE):
        return "open"
    return "optional" if opens_itself and not turn else "none"
