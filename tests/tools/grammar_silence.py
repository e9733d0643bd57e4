"""The longest silence of a plain stream while other requests bring grammars.

`python -m tests.tools.grammar_silence ENDPOINT [LOAD[:NUMBER] ...]`: for each load, the requests
with grammars, then as many plain ones, again and again for the same time, all next to one plain
stream. Prints the longest time between two pieces of this stream's text, and how the requests
ended. Asked: at most three times the silence of the plain requests.
"""

import asyncio
import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from penstock.protocol.client.async_client import AsyncClient
from penstock.protocol.client.session import ClientError
from penstock.protocol.messages.structured import StructuredOutputs

LONG = "count from 1 to 999"
MAX_TOKENS = 16
number = itertools.count()


def pattern_properties() -> dict[str, Any]:
    """Return the same 5 KB on each call."""
    patterns = {f"^k{index}_[a-z]+$": {"type": "integer"} for index in range(165)}
    return {"type": "object", "patternProperties": patterns, "additionalProperties": False}


def multiple() -> dict[str, Any]:
    """Return another 180 bytes on each call."""
    own = {f"a{next(number)}": {"type": "integer", "multipleOf": 39989}}
    return {"type": "object", "properties": own, "required": list(own)}


def many_fields() -> dict[str, Any]:
    """Return the same 30 KB on each call: an ordinary case."""
    text = {"type": "string", "description": "x" * 60, "maxLength": 30}
    names = [f"field_{index}" for index in range(240)]
    return {"type": "object", "properties": dict.fromkeys(names, text), "required": names}


def tiny() -> dict[str, Any]:
    """Return another tiny schema on each call."""
    return {"const": f"x{next(number)}"}


def refused() -> dict[str, Any]:
    """Return another schema on each call that is refused."""
    return {"type": "object", "properties": {"a": {"not": {"const": next(number)}}}}


LOADS: dict[str, tuple[int, Callable[[], dict[str, Any]]]] = {
    "pattern_properties": (240, pattern_properties),
    "multiple": (60, multiple),
    "many_fields": (32, many_fields),
    "tiny": (1000, tiny),
    "refused": (200, refused),
}


async def longest_gap(client: AsyncClient, others: list[Any]) -> tuple[float, Counter[str]]:
    """Return the longest silence of a stream that lasts until the others have ended."""
    results: asyncio.Future[list[Any]] = asyncio.gather(*others, return_exceptions=True)
    longest = 0.0
    while not results.done():
        stream, last = client.stream(LONG, ignore_eos=True, max_tokens=900), time.monotonic()
        async for _ in stream:
            now = time.monotonic()
            longest, last = max(longest, now - last), now
            if results.done():
                await stream.abort()
                break
    ends: Counter[str] = Counter()
    for result in await results:
        is_error = isinstance(result, ClientError)
        ends[str(result)[:90] if is_error else result.finish_reason] += 1
    return longest, ends


async def main(endpoint: str, names: list[str]) -> None:
    async with AsyncClient(endpoint) as own, AsyncClient(endpoint) as client:
        for asked_for in names or LOADS:
            name, _, number_of = asked_for.partition(":")
            size, schema = LOADS[name]
            size = int(number_of or size)
            grammars = [StructuredOutputs(json=schema()) for _ in range(size)]
            asked = [
                client.generate("17+25=", max_tokens=MAX_TOKENS, structured_outputs=grammar)
                for grammar in grammars
            ]
            begin = time.monotonic()
            gap, ends = await longest_gap(own, asked)
            middle = time.monotonic()
            plain, waves = 0.0, 0
            while time.monotonic() < 2 * middle - begin:
                wave = [client.generate("17+25=", max_tokens=MAX_TOKENS) for _ in range(size)]
                plain, waves = max(plain, (await longest_gap(own, wave))[0]), waves + 1
            print(f"{name}: {size} requests, {middle - begin:.1f} s, longest silence {gap:.3f} s")
            print(f"  plain: {waves} x {size} requests, longest silence {plain:.3f} s")
            for end, times in ends.most_common(4):
                print(f"  {times} x {end}", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2:]))
