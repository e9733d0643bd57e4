"""A client that measures any server with OpenAI's API by streams of `/v1/completions`.

Prompts are token ids, so that their lengths are exact. Token ids are below 10,000, which nearly
every vocabulary contains. For a smaller vocabulary, they are below 256, where tokenizers have
bytes.
"""

import asyncio
import os
import sys
import time
from typing import Any, Self

import httpx
import msgspec
from msgspec import Struct

from penstock.launch.bench.figures import Figures, Stamps, stream_figures, usage_figures
from penstock.launch.bench.options import MAX_TOKEN_ID, Item, ModelOptions
from penstock.launch.commands.api_key import read_api_key
from penstock.launch.pipeline.errors import LaunchError
from penstock.protocol.client.session import ClientError
from penstock.protocol.config import Config
from penstock.protocol.messages.client import Usage
from penstock.protocol.transport.channel import DECODE_ERRORS

KEY_FIELDS = ("api_key", "api_key_file")
SMALL_VOCABULARY = 256
PATH = "/v1/completions"
ERRORS = (httpx.HTTPError, *DECODE_ERRORS, ClientError)
CONNECT_SECONDS = 30.0


def server_key(given: dict[str, Any]) -> str:
    """Return the API key from the options or the environment. Raises LaunchError."""
    options = {field: given[field] for field in KEY_FIELDS if field in given}
    return read_api_key(Config(**options)).api_key or os.environ.get("OPENAI_API_KEY", "")


class _Details(Struct):
    cached_tokens: int | None = 0


class _Usage(Struct):
    prompt_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Choice(Struct):
    text: str | None = ""
    finish_reason: str | None = None


class _Chunk(Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class HttpMeter:
    """A client that measures over HTTP what `Meter` does over ZeroMQ."""

    def __init__(self, base_url: str, key: str, model: str, options: ModelOptions) -> None:
        """Connect; model: empty for the first model that the server lists. Raises LaunchError."""
        try:
            self._client = httpx.AsyncClient(
                base_url=base_url.rstrip("/").removesuffix("/v1"),
                headers={"Authorization": f"Bearer {key}"} if key else {},
                timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
                trust_env=False,
            )
        except (httpx.InvalidURL, UnicodeEncodeError) as error:
            raise LaunchError(
                f"--base-url: got {base_url!r}, expected an address: {error}"
            ) from None
        self._options = options
        self._runner = asyncio.Runner()
        self.model = model
        self.vocab_size = MAX_TOKEN_ID + 1
        self.last_error = ""

    def __enter__(self) -> Self:
        try:
            self._runner.run(self._prepare())
        except BaseException:
            self._runner.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._client.aclose())
        self._runner.close()

    def run(self, items: list[Item]) -> Figures:
        """Measure streams that are all sent at the same time."""
        return self.run_load(items, [0.0] * len(items))[0]

    def run_one_by_one(self, items: list[Item]) -> Figures:
        """Measure streams in turn; each request is sent after the previous stream has ended."""
        return stream_figures(self.run_load(items, [0.0] * len(items), 1)[1])

    def run_load(
        self, items: list[Item], times: list[float], max_concurrency: int = 0
    ) -> tuple[Figures, list[Stamps]]:
        """Measure streams like `Meter.run_load`. Raises LaunchError if all requests fail."""
        start = time.perf_counter()
        results = self._runner.run(self._load(items, times, max_concurrency))
        seconds = time.perf_counter() - start
        usages = [usage for _, usage in results if usage]
        if not usages:
            raise LaunchError(f"every request failed; the last one: {self.last_error}")
        if num_failed := len(results) - len(usages):
            text = f"{num_failed} requests failed; the last one: {self.last_error}"
            print(f"\nlaunch: {text}", file=sys.stderr)
        more = {"failed": num_failed, "preemptions": 0}
        return usage_figures(usages, seconds) | more, [stamps for stamps, _ in results]

    async def _prepare(self) -> None:
        """Find out the model's name and the size of the vocabulary. Raises LaunchError."""
        try:
            if not self.model:
                listed = await self._client.get("/v1/models")
                self._check(listed)
                self.model = str(msgspec.json.decode(listed.content)["data"][0]["id"])
            for self.vocab_size in (MAX_TOKEN_ID + 1, SMALL_VOCABULARY):
                body = self._body(Item([self.vocab_size - 1], 1))
                answer = await self._client.post(PATH, json=body)
                if answer.status_code == httpx.codes.OK:
                    return
            self._check(answer)
        except (*ERRORS, LookupError, TypeError) as error:
            reason = str(error) or type(error).__name__
            raise LaunchError(f"--base-url: {self._client.base_url}: {reason}") from error

    @staticmethod
    def _check(response: httpx.Response) -> None:
        """Raise ClientError for an error response, whose body has been read."""
        if response.status_code != httpx.codes.OK:
            body = response.text.strip()
            raise ClientError(f"{response.url.path} answers {response.status_code}: {body[:500]}")

    async def _load(
        self, items: list[Item], times: list[float], max_concurrency: int
    ) -> list[tuple[Stamps, Usage | None]]:
        start = time.perf_counter()
        places = asyncio.Semaphore(max_concurrency or len(items))

        async def send(item: Item, seconds: float) -> tuple[Stamps, Usage | None]:
            await asyncio.sleep(start + seconds - time.perf_counter())
            async with places:
                return await self._measure(item)

        return await asyncio.gather(*map(send, items, times))

    async def _measure(self, item: Item) -> tuple[Stamps, Usage | None]:
        """Return the times of a stream and its usage, which is None if the request failed."""
        stamps = Stamps(time.perf_counter())
        try:
            usage = await self._stream(item, stamps)
        except ERRORS as error:
            self.last_error = str(error) or type(error).__name__
            stamps.times.clear()
            return stamps, None
        if not stamps.times:  # the tokens had no text
            stamps.add(0)
        stamps.num_tokens = usage.output_tokens
        return stamps, usage

    async def _stream(self, item: Item, stamps: Stamps) -> Usage:
        """Record the events with text. Raises ClientError for a stream without its end."""
        usage, is_finished = None, False
        body = self._body(item) | {"stream": True, "stream_options": {"include_usage": True}}
        async with self._client.stream("POST", PATH, json=body) as response:
            if response.status_code != httpx.codes.OK:
                await response.aread()
                self._check(response)
            async for line in response.aiter_lines():
                name, _, data = line.partition(":")
                if name != "data" or not data.strip():
                    continue
                if data.strip() == "[DONE]":
                    return self._usage(item, stamps, usage)
                chunk = msgspec.json.decode(data, type=_Chunk)
                if chunk.error:
                    raise ClientError(str(chunk.error))
                if any(choice.text for choice in chunk.choices):
                    stamps.add(1)
                is_finished |= any(choice.finish_reason for choice in chunk.choices)
                usage = chunk.usage or usage
        if is_finished and usage:  # some servers do not send [DONE]
            return self._usage(item, stamps, usage)
        raise ClientError("the stream broke off before its end")

    @staticmethod
    def _usage(item: Item, stamps: Stamps, usage: _Usage | None) -> Usage:
        """Return the server's usage; if it is missing, each event counts as a token."""
        if usage is None:
            usage = _Usage(len(item.prompt), stamps.num_tokens)
        details = usage.prompt_tokens_details or _Details()
        return Usage(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=details.cached_tokens or 0,
            output_tokens=usage.completion_tokens,
        )

    def _body(self, item: Item) -> dict[str, Any]:
        options = self._options
        body = {
            "model": self.model,
            "prompt": item.prompt,
            "max_tokens": item.num_output_tokens,
            "ignore_eos": True,
            "temperature": options.temperature,
            "top_p": options.top_p,
        }
        if options.top_k != -1:  # OpenAI's API lacks this field
            body["top_k"] = options.top_k
        return body
