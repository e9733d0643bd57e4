"""The `n` answers to a prompt: one request each, because the gateway answers a request once."""

import asyncio
import uuid
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

import msgspec

from penstock.protocol.client.errors import RequestError
from penstock.protocol.client.session import Answer
from penstock.protocol.field_errors import explain
from penstock.protocol.messages.client import ErrorReply, GenerateRequest
from penstock.protocol.messages.sampling import SamplingParams

T = TypeVar("T")
_NUM_SEEDS = 2**64


def answer_requests(request: GenerateRequest) -> list[GenerateRequest]:
    """Return a request for each of the `n` answers to a prompt. Raises RequestError.

    Answer i has the id NAME-i and, with a seed, the seed + i. Only the first answer has
    `prompt_logprobs`, because computing them bypasses the prefix cache.
    """
    number = num_answers(request)
    name = request.request_id or uuid.uuid4().hex
    first = msgspec.structs.replace(request, n=1, request_id=f"{name}-0", num_answers=number)
    return [first, *(_further(first, f"{name}-{index}", index) for index in range(1, number))]


def ask_n(request: GenerateRequest, ask: Callable[[GenerateRequest], Answer]) -> list[Answer]:
    """Send a request for each answer to a prompt with `ask`. Raises RequestError."""
    answers = [ask(one) for one in answer_requests(request)]
    for answer in answers:
        answer.prompt_id = request.request_id
    return answers


def num_answers(params: SamplingParams) -> int:
    """Return `n`. Raises RequestError if `n`, or a seed to which the index is added, is invalid."""
    given = {"n": params.n, "seed": params.seed}
    try:
        return msgspec.convert(given, SamplingParams).n
    except msgspec.ValidationError as error:
        field, message = explain(str(error), given, SamplingParams)
        raise RequestError(ErrorReply(code="invalid", message=message, field=field)) from None


def _further(first: GenerateRequest, request_id: str, index: int) -> GenerateRequest:
    return msgspec.structs.replace(
        first,
        request_id=request_id,
        seed=None if first.seed is None else _seed(first.seed + index),
        prompt_logprobs=None,
        num_answers=0,
    )


def _seed(number: int) -> int:
    """Return the signed 64-bit seed after an overflow."""
    return (number + _NUM_SEEDS // 2) % _NUM_SEEDS - _NUM_SEEDS // 2


async def gather(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results; the first failure cancels the others."""
    works = [*work]
    if len(works) == 1:
        return [await works[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in works]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
