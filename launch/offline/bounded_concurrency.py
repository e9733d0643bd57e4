"""Many requests of one client, with no more of them open than the pipeline accepts."""

import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator

from penstock.protocol.client.client import Client
from penstock.protocol.client.session import Answer, Done
from penstock.protocol.messages.client import AbortRequest, ErrorReply, Request


def ask_all(
    client: Client, questions: Iterable[Request], size: int
) -> Generator[tuple[int, Done], None, None]:
    """Each reply when it comes, with the place of its question; at most `size` are open.

    Where the pipeline is `overloaded` all the same, nothing is sent until another answer has come,
    or, where none is open, for as long as it said. What is open when this ends early is aborted.
    Raises RequestError.
    """
    waiting = enumerate(questions)
    refused: deque[tuple[int, Request]] = deque()
    flights: dict[int, Answer] = {}
    ended: deque[int] = deque()
    has_room = True
    try:
        while True:
            while has_room and len(flights) < size and (pair := _next(refused, waiting)):
                _send(client, pair, flights, ended)
            if not flights:
                return
            while not ended:
                client.wait()
            place = ended.popleft()
            answer = flights.pop(place)
            has_room = not _is_overloaded(answer)
            if has_room:
                yield place, answer.result()
                continue
            refused.append((place, answer.question))
            if not flights:
                client.take_until(time.perf_counter() + _retry_after(answer))
                has_room = True
    finally:
        for answer in flights.values():
            if answer.request_id:
                client.ask(AbortRequest(request_id=answer.request_id))


def _next(
    refused: deque[tuple[int, Request]], waiting: Iterator[tuple[int, Request]]
) -> tuple[int, Request] | None:
    return refused.popleft() if refused else next(waiting, None)


def _send(
    client: Client, pair: tuple[int, Request], flights: dict[int, Answer], ended: deque[int]
) -> None:
    place, question = pair
    answer = flights[place] = client.ask(question)

    def on_change() -> None:
        if answer.final:
            ended.append(place)

    answer.on_change = on_change
    on_change()  # what came while it was sent


def _is_overloaded(answer: Answer) -> bool:
    return isinstance(answer.final, ErrorReply) and answer.final.code == "overloaded"


def _retry_after(answer: Answer) -> float:
    return getattr(answer.final, "retry_after", None) or 1.0
