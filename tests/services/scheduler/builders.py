"""Requests and sequences in one line."""

from collections.abc import Sequence as SequenceOf
from itertools import count

from penstock.protocol.messages.packed import pack
from penstock.protocol.messages.pipeline import TokenizedRequest
from penstock.protocol.messages.sampling import Pooling, SamplingParams
from penstock.protocol.messages.structured import Reasoning
from penstock.protocol.tokenizer_file import ReasoningTokens
from penstock.services.scheduler.sequence import Sequence
from tests.services.scheduler.reference import EOS, TAGS, expected_output

_numbers = count()


def make_sequence(
    prompt: SequenceOf[int] = (1, 2, 3),
    output: SequenceOf[int] = (),
    cache_salt: str = "",
    client: str = "",
    priority: int = 0,
    pooling: Pooling | None = None,
    is_chat: bool = False,
    reasoning: Reasoning = "none",
    tags: ReasoningTokens = TAGS,
    **sampling: object,
) -> Sequence:
    """Return a new sequence; `output` is what an earlier attempt generated."""
    params = SamplingParams(**({"seed": 0} | sampling))  # type: ignore[arg-type]
    request = TokenizedRequest(f"r{next(_numbers)}", 0, params, pack(prompt), pack(output))
    request.cache_salt, request.pooling = cache_salt, pooling
    request.client, request.priority = client, priority
    request.is_chat, request.reasoning = is_chat, reasoning
    return Sequence(request, frozenset({EOS}), tags)


def long_prompt(num_tokens: int, first: int = 1) -> list[int]:
    """Return a prompt without repetition; those with another `first` differ in every block."""
    return list(range(first, first + num_tokens))


def seed_for_eos_after(prompt: SequenceOf[int], num_tokens: int) -> int:
    """Return a seed with which the model ends `prompt` with EOS as output `num_tokens`."""
    for seed in count():
        params = SamplingParams(seed=seed)
        output, reason = expected_output(prompt, params, len(prompt) + num_tokens + 1)
        if len(output) == num_tokens and reason == "stop":
            return seed
    raise AssertionError
