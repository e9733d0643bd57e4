"""The type of routes, and the state that all routes share, for each model."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal, NamedTuple, TypeVar

from msgspec import Struct
from starlette.responses import Response

from penstock.protocol.checkpoint import max_request_bytes, read_model_config
from penstock.protocol.client.async_client import AsyncClient
from penstock.protocol.client.session import RequestError
from penstock.protocol.config import Config
from penstock.protocol.tokenizer_file import (
    choose_template,
    read_chat_templates,
    read_generation_config,
)
from penstock.services.http.shared.errors import ApiError

T = TypeVar("T")
MAX_BATCH = 8  # requests of maximum length that fit into one body with several inputs
START_TIMEOUT = 5.0  # seconds that a request waits for a pipeline that is starting
MAX_RETRY_AFTER = 60  # seconds
EVENT_STREAM = "text/event-stream"  # media type
Texts = dict[str, str]
OPENING, CLOSING = "<tool_call>", "</tool_call>"
FUNCTION = "<function="  # the beginning of a call in Qwen3-Coder's format
FormatName = Literal["hermes", "qwen3_coder", "json"]


class Operation(Struct, frozen=True):
    """A route. Each API has a list of routes, and `apis.py` lists the APIs.

    `run` gets the body, and the state of the model that the body names. Without a body, `run` gets
    all models, and the parameters of path and query. `run` may raise ApiError, MessageError and
    RequestError. The first line of its docstring is the summary of the route.
    """

    method: str
    path: str
    run: Callable[[Any, Any], Awaitable[Response]]
    reply: Any  # type of the JSON reply; None without JSON
    body: type[Struct] | None = None
    media_type: str = ""  # media type of replies in addition to JSON
    is_open: bool = False  # True if the route needs no key
    is_batch: bool = False  # True if the body has several inputs, each a request to the gateway


class ToolFormat(NamedTuple):
    """Form in which the model writes calls."""

    name: FormatName = "hermes"
    # True if `<tool_call>` is in the vocabulary: llguidance does not treat the tag as text
    tags_are_tokens: bool = False


HERMES = ToolFormat()


class TagIds(NamedTuple):
    """Token ids of tags in the model's answers."""

    end_of_thought: list[int]  # `</think>`
    tool_call: list[int]  # `<tool_call>`


def format_of(chat_template: str) -> FormatName:
    """Return the format that a chat template shows to the model."""
    if FUNCTION in chat_template:
        return "qwen3_coder"
    return "json" if "tools" in chat_template and OPENING not in chat_template else "hermes"


class Singletons:
    """One object of each class for this process, shared by all models."""

    def __init__(self) -> None:
        self._objects: dict[type, Any] = {}

    def get(self, kind: type[T], *given: Any) -> T:
        """Return the object of a class. The first call creates it with the given arguments."""
        if kind not in self._objects:
            self._objects[kind] = kind(*given)
        found: T = self._objects[kind]
        return found


class AppState:
    """A client of one model, and properties of the model."""

    def __init__(self, config: Config, client: AsyncClient, singletons: Singletons) -> None:
        folder = config.model_folder
        self.config = config
        self.model = config.model_name
        self.client = client.of_model(self.model)
        self.created = int(time.time())
        model = read_model_config(folder)
        self.max_model_len = model.context(config.max_model_len)
        self.is_embedding_model = model.is_embedding_model
        self.max_request_bytes = max_request_bytes(config)
        # maximum number of answers to an HTTP request: the gateway would refuse more
        self.max_answers = config.max_running + config.max_waiting_requests
        given = config.tool_call_parser
        template = choose_template(read_chat_templates(folder), has_tools=True) or ""
        self.tool_format = ToolFormat(format_of(template) if given == "auto" else given)
        self.generation_config = read_generation_config(folder)
        self.tags = TagIds([], [])  # set once the model was ready
        self.label_ids: list[int] | None = None  # label tokens of a reranker, once known
        self.cached_block = 0  # tokens of a block of the prefix cache; 0: no prefix cache
        self.singletons = singletons
        self._was_ready = asyncio.Event()
        self._started_at = time.monotonic()

    async def start(self) -> None:
        """Wait for the model, and look up tokens in its vocabulary."""
        status = await self.client.status(wait=True)
        model = next((model for model in status.by_model if model.name == self.model), status)
        if model.scheduler and self.config.enable_prefix_caching:
            self.cached_block = model.scheduler.block_size
        tool_call = await self._token_ids(OPENING)
        self.tool_format = self.tool_format._replace(tags_are_tokens=len(tool_call) == 1)
        self.tags = TagIds(await self._token_ids("</think>"), tool_call)
        self._was_ready.set()

    async def _token_ids(self, text: str) -> list[int]:
        """Return the tokens of a text, also if an overloaded pipeline refuses to count at first."""
        while True:
            try:
                return (await self.client.tokenize(text)).token_ids
            except RequestError as error:
                await asyncio.sleep(error.retry_after or 1.0)

    async def check_start(self) -> None:
        """Raise ApiError before the model was ready for the first time.

        Later, a request waits in the gateway while processes restart.
        """
        if self._was_ready.is_set():
            return
        try:
            await asyncio.wait_for(self._was_ready.wait(), START_TIMEOUT)
        except TimeoutError:
            # the start may take as long again as it has taken so far
            seconds = min(math.ceil(time.monotonic() - self._started_at), MAX_RETRY_AFTER)
            sentence = "the pipeline is starting; /health reports what is missing"
            raise ApiError(503, sentence, headers={"Retry-After": str(seconds)}) from None


class Models:
    """Every model, and the state that all models share."""

    def __init__(self, config: Config, client: AsyncClient) -> None:
        self.config, self.client = config, client
        self.singletons = Singletons()
        self.states = [AppState(part, client, self.singletons) for part in config.by_model()]
        self.by_name = {name: state for state in self.states for name in state.config.model_names}
        self.default = self.states[0]
        self.max_request_bytes = max_request_bytes(config)
        self.max_batch_bytes = MAX_BATCH * self.max_request_bytes
        self.max_answers = max(state.max_answers for state in self.states)

    async def start(self) -> None:
        """Wait for all models. Each model serves as soon as it is ready."""
        await asyncio.gather(*(state.start() for state in self.states))

    def named(self, model: str | None) -> AppState:
        """Return a model; None is the first model. Raises ApiError for an unknown name."""
        if model is None:
            return self.default
        if model not in self.by_name:
            names = " or ".join(map(repr, self.by_name))
            sentence = f"model: got {model!r}, expected {names}"
            raise ApiError(404, sentence, "model", "model_not_found")
        return self.by_name[model]

    async def started(self, model: str | None) -> AppState:
        """Return a model that was ready once. Raises the errors of `named` and `check_start`."""
        state = self.named(model)
        await state.check_start()
        return state
