"""Many requests of one client, with no more of them open than the pipeline accepts."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from functools import partial
from typing import Any, TypeVar

from penstock.protocol.client.client import Client
from penstock.protocol.client.session import Answer, Done, Final
from penstock.protocol.messages.client import AbortRequest, ErrorReply, Request

Kind = TypeVar("Kind", bound=Done)


def replies_to(
    client: Client,
    requests: Iterable[Request],
    size: int,
    kind: type[Kind],
    on_reply: Callable[[], Any] = lambda: None,
) -> list[Kind]:
    """Return the replies in the order of their requests, as `submit_all` sends them.

    on_reply: called when one has come. Raises RequestError.
    """
    found: dict[int, Kind] = {}
    with contextlib.closing(submit_all(client, requests, size)) as replies:
        for place, reply in replies:
            assert isinstance(reply, kind)  # noqa: S101  for mypy
            found[place] = reply
            on_reply()
    return [found[place] for place in range(len(found))]


def submit_all(
    client: Client, requests: Iterable[Request], size: int
) -> Generator[tuple[int, Done], None, None]:
    """Yield each reply when it comes, with the place of its request; up to `size` are open.

    Where the pipeline is `overloaded` all the same, nothing is sent until another reply has come,
    or, where none is open, for as long as it said. What is open when this ends early is aborted.
    Raises RequestError.
    """
    waiting = enumerate(requests)
    refused: deque[tuple[int, Request]] = deque()
    open_answers: dict[int, Answer] = {}
    ended: deque[int] = deque()

    def note_end(place: int) -> None:
        if open_answers[place].final:
            ended.append(place)

    def send(num_free: int) -> None:
        while num_free and (pair := refused.popleft() if refused else next(waiting, None)):
            place, request = pair
            answer = open_answers[place] = client.ask(request)
            answer.on_change = partial(note_end, place)
            note_end(place)  # what came while it was sent
            num_free -= 1

    try:
        send(size)
        while open_answers:
            while not ended:
                client.wait()
            place = ended.popleft()
            answer = open_answers.pop(place)
            if (seconds := _retry_after(answer.final)) is None:
                yield place, answer.result()
                send(size - len(open_answers))
                continue
            refused.append((place, answer.question))
            if not open_answers:
                client.take_until(time.perf_counter() + seconds)
                send(size)
    finally:
        _abort(client, open_answers.values())


def _retry_after(final: Final | None) -> float | None:
    """Return the seconds after which to send again; None if the pipeline was not overloaded."""
    is_overloaded = isinstance(final, ErrorReply) and final.code == "overloaded"
    return getattr(final, "retry_after", None) or 1.0 if is_overloaded else None


def _abort(client: Client, answers: Iterable[Answer]) -> None:
    for answer in answers:
        if answer.request_id:
            client.ask(AbortRequest(request_id=answer.request_id))
