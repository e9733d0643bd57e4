"""`/v1/responses`, and its stored responses."""

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, Struct
from starlette.responses import Response

from penstock.protocol.decoding import explain
from penstock.protocol.messages.client import GenerateReply, TextDelta
from penstock.services.http.generation.chat import (
    ChatChoice,
    ChatEvents,
    Event,
    PartKind,
    count_prompt_tokens,
    submit_chat,
)
from penstock.services.http.generation.schema import CalledTool
from penstock.services.http.responses.schema import (
    AnyRequest,
    DeletedResponse,
    FunctionCallItem,
    InputItems,
    InputItemsQuery,
    InputTokens,
    InputTokensRequest,
    Item,
    OutputItem,
    OutputMessage,
    OutputText,
    Reasoning,
    ReasoningItem,
    ReasoningText,
    ResponseError,
    ResponseReply,
    ResponsesRequest,
    ResponseUsage,
    RetrieveQuery,
    TextFormat,
    TextUsed,
)
from penstock.services.http.responses.to_chat_request import (
    OfferedTools,
    chat_request,
    input_items,
    name_in_responses,
    offer,
)
from penstock.services.http.shared.access import caller
from penstock.services.http.shared.app_state import (
    EVENT_STREAM,
    OPENING,
    AppState,
    Models,
    Operation,
    TagIds,
)
from penstock.services.http.shared.errors import (
    CONTEXT_LENGTH_EXCEEDED,
    ENCODER,
    ApiError,
    invalid,
    json_response,
)
from penstock.services.http.shared.event_stream import DONE

MAX_BYTES = 64 << 20
# approximate bytes of an entry's objects, and of an item's name
_OVERHEAD = 1024
_DECODER = msgspec.msgpack.Decoder(list[Item])
_WHY = (
    "which is not stored: without store: false, responses are stored in the memory of one http "
    "process until newer ones need their place"
)

_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
# fields that a response has even if its request lacks them
_OWN = {"model", "reasoning", "service_tier", "text", "tools", "top_logprobs"}
Query = TypeVar("Query", bound=Struct)
_PATH = "/v1/responses"
_STORED = f"{_PATH}/{{response_id}}"


class _Entry(Struct):
    key: str  # API key of the client that alone may use the entry
    input: bytes  # the conversation up to the output
    output: bytes
    body: bytes  # the response
    names: list[str]  # ids of the output's items

    def num_bytes(self) -> int:
        texts = len(self.input) + len(self.output) + len(self.body)
        return texts + _OVERHEAD * (1 + len(self.names))


class ResponseStore:
    """The responses of one http process, least recently used first."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._entries: dict[str, _Entry] = {}
        self._items: dict[str, str] = {}  # id of an item → id of its response

    def put(self, response: ResponseReply, items: Sequence[Item]) -> bool:
        """Keep a response. Return False, and change nothing, if the response alone is too large.

        items: input of this response and of the responses before.
        """
        output = _DECODER.decode(msgspec.msgpack.encode(response.output))
        entry = _Entry(
            key=caller.get().key,
            input=msgspec.msgpack.encode(items),
            output=msgspec.msgpack.encode(output),
            body=ENCODER.encode(response),
            names=[item.id for item in response.output],
        )
        if entry.num_bytes() > self._max_bytes:
            return False
        self._entries[response.id] = entry
        self._items.update(dict.fromkeys(entry.names, response.id))
        self.num_bytes += entry.num_bytes()
        while self.num_bytes > self._max_bytes:
            self._remove(next(iter(self._entries)))
        return True

    def body(self, response_id: str) -> bytes:
        """Return a response in JSON. Raises ApiError."""
        return self._find(response_id, "response_id").body

    def input_items(self, response_id: str) -> list[Item]:
        """Return the conversation up to the output of a response. Raises ApiError."""
        return _DECODER.decode(self._find(response_id, "response_id").input)

    def items(self, response_id: str) -> list[Item]:
        """Return the conversation up to the end of a response. Raises ApiError."""
        entry = self._find(response_id, "previous_response_id", "previous_response_not_found")
        return _DECODER.decode(entry.input) + _DECODER.decode(entry.output)

    def resolved(self, items: Iterable[Item]) -> list[Item]:
        """Return items with references resolved, each at most once. Raises ApiError."""
        found, kept = [], dict[str, Item]()
        used = set[str]()
        for number, item in enumerate(items):
            if item.type == "item_reference":
                name, path = item.id or "", f"input[{number}].id"
                if name in used:
                    raise invalid(path, f"got {name!r:.200} again, expected one reference to it")
                used.add(name)
                if name not in kept:
                    kept |= self._output(name, path)
                item = kept[name]
            found.append(item)
        return found

    def remove(self, response_id: str) -> None:
        """Forget a response. Raises ApiError."""
        self._find(response_id, "response_id")
        self._remove(response_id)

    def _find(self, response_id: str, field: str, code: str | None = None) -> _Entry:
        entry = self._entries.get(response_id)
        if entry is None or entry.key != caller.get().key:
            status = 400 if code else 404
            raise ApiError(status, f"{field}: got {response_id!r:.200}, {_WHY}", field, code)
        self._entries[response_id] = self._entries.pop(response_id)
        return entry

    def _output(self, name: str, path: str) -> dict[str, Item]:
        """Return all items, by id, of the output that contains the item `name`."""
        response_id = self._items.get(name, "")
        entry = self._entries.get(response_id)
        if entry is None or entry.key != caller.get().key:
            problem = "which is not kept: send the item itself, or leave out store: false"
            raise ApiError(404, f"{path}: got {name!r:.200}, {problem}", path)
        self._entries[response_id] = self._entries.pop(response_id)
        return dict(zip(entry.names, _DECODER.decode(entry.output), strict=True))

    def _remove(self, response_id: str) -> None:
        if entry := self._entries.pop(response_id, None):
            self.num_bytes -= entry.num_bytes()
            for name in entry.names:
                self._items.pop(name, None)


class ResponseEvents(ChatEvents):
    """Converter of one answer, which fills a response.

    A stream ends with `[DONE]`, as the Open Responses specification demands.
    """

    end = DONE

    def __init__(
        self,
        response: ResponseReply,
        choice: ChatChoice,
        names: Mapping[str, tuple[str | None, str]],
        tags: TagIds,
        keep: Callable[[ResponseReply], None],
    ) -> None:
        """Prepare the events of `response`.

        names: namespace and name of each function, by the name that the model sees.
        keep: called with the final response.
        """
        super().__init__(choice, response, response.output)
        self._response = response
        self._names = names
        self._tags = tags
        self._keep = keep
        self._num_events = 0

    def _start(self, _: TextDelta | GenerateReply | None) -> Iterator[Event]:
        yield self._event("response.created", response=self._response)
        yield self._event("response.in_progress", response=self._response)

    def failed(self, error: ApiError) -> Iterator[Event]:
        """Yield the event of an error after the first event."""
        detail = error.body.error
        yield from self._close(is_whole=False)
        self._response.status = "failed"
        code = _CODES.get(error.status, "server_error")
        if error.too_long:
            code = CONTEXT_LENGTH_EXCEEDED
        self._response.error = ResponseError(code=code, message=detail.message)
        self._keep(self._response)
        yield self._event("response.failed", response=self._response)

    def _event(self, kind: str, /, **fields: Any) -> Event:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}

    def _of_item(self, kind: str, /, **fields: Any) -> Event:
        """Return an event about the last item."""
        index = len(self._response.output) - 1
        item_id = self._response.output[index].id
        return self._event(kind, item_id=item_id, output_index=index, **fields)

    def _of_part(self, kind: str, /, **fields: Any) -> Event:
        """Return an event about the last item's only part."""
        return self._of_item(kind, content_index=0, **fields)

    def _new_part(self, kind: PartKind, call: CalledTool | None) -> OutputItem:
        if kind == "reasoning":
            return ReasoningItem(id=_new_id("rs"))
        if call is None:
            return OutputMessage(id=_new_id("msg"))
        name = call.function.name or ""
        namespace, name = self._names.get(name, (None, name))
        return FunctionCallItem(
            id=_new_id("fc"), call_id=call.id or "", name=name, namespace=namespace or UNSET
        )

    def _begun(self, part: OutputItem) -> Iterator[Event]:
        index = len(self._response.output) - 1
        yield self._event("response.output_item.added", output_index=index, item=part)
        if isinstance(part, OutputMessage):
            yield self._of_part("response.content_part.added", part=OutputText())
        elif isinstance(part, ReasoningItem):
            yield self._of_part("response.content_part.added", part=ReasoningText())

    def _added(self, kind: PartKind, text: str) -> Event:
        if kind == "reasoning":
            return self._of_part("response.reasoning_text.delta", delta=text)
        if kind == "text":
            return self._of_part("response.output_text.delta", delta=text, logprobs=[])
        return self._of_item("response.function_call_arguments.delta", delta=text)

    def _closed(self, part: OutputItem, text: str, is_whole: bool) -> Iterator[Event]:
        match part:
            case OutputMessage():
                part.content = [OutputText(text=text)]
                yield self._of_part("response.output_text.done", text=text, logprobs=[])
                yield self._of_part("response.content_part.done", part=part.content[0])
            case ReasoningItem():
                part.content = [ReasoningText(text=text)]
                yield self._of_part("response.reasoning_text.done", text=text)
                yield self._of_part("response.content_part.done", part=part.content[0])
            case FunctionCallItem():
                part.arguments = text
                if is_whole:  # clients run a call whose arguments are done
                    yield self._of_item(
                        "response.function_call_arguments.done", name=part.name, arguments=text
                    )
        part.status = "completed" if is_whole else "incomplete"
        index = len(self._response.output) - 1
        yield self._event("response.output_item.done", output_index=index, item=part)

    def _end(self, reply: GenerateReply) -> Iterator[Event]:
        response = self._response
        if not response.output:
            yield from self._begin("text")
            # benchmark clients wait for a piece, even if no token had text
            yield self._of_part("response.output_text.delta", delta="", logprobs=[])
        is_whole = reply.finish_reason == "stop"
        yield from self._close(is_whole)
        response.usage = self._usage(reply)
        if is_whole:
            response.status, response.completed_at = "completed", int(time.time())
            self._keep(response)
            yield self._event("response.completed", response=response)
        else:
            is_long = reply.finish_reason == "length"
            response.status = "incomplete"
            response.incomplete_details = {"reason": "max_output_tokens" if is_long else "abort"}
            self._keep(response)
            yield self._event("response.incomplete", response=response)

    def _usage(self, reply: GenerateReply) -> ResponseUsage:
        usage = reply.usage
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details={"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            output_tokens=usage.output_tokens,
            output_tokens_details={"reasoning_tokens": self._num_reasoning_tokens(reply)},
            total_tokens=usage.prompt_tokens + usage.output_tokens,
        )

    def _num_reasoning_tokens(self, reply: GenerateReply) -> int:
        """Return the number of tokens up to `</think>`.

        Without `</think>`, a call ends the reasoning, or all tokens are reasoning. Reasoning may
        mention the tag of calls: the first tag after these mentions begins the call.
        """
        thought, *others = self._response.output
        if not isinstance(thought, ReasoningItem):
            return 0
        ids, (end, tag) = reply.token_ids, self._tags
        if others and (ends := _places(ids, end)):
            return ends[0] + len(end)
        num_mentions = sum(part.text.count(OPENING) for part in thought.content)
        begins = _places(ids, tag)[num_mentions:] if others else []
        return begins[0] if begins else len(ids)


def _places(ids: list[int], part: list[int]) -> list[int]:
    """Return the indices at which `part` begins in `ids`."""
    length = len(part)
    return [n for n in range(len(ids) - length + 1) if ids[n : n + length] == part]


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


async def respond(state: AppState, request: ResponsesRequest) -> Response:
    """Answer the items of a conversation."""
    state.generation_config.fill(request)
    request.request_id = request.request_id or caller.get().request_id or None
    store = state.singletons.get(ResponseStore)
    items, tools = conversation(store, request), offer(request.tools)
    chat = chat_request(request, items, tools)
    generation = submit_chat(state, "resp", chat, partial(name_in_responses, tools))
    choice = ChatChoice(0, chat, state.tool_format)

    def keep(response: ResponseReply) -> None:
        response.store = response.store and store.put(response, items)

    response = begun(request, tools, state.model)
    events = ResponseEvents(response, choice, tools.names, state.tags, keep)
    return await events.response(generation, request.stream)


def conversation(store: ResponseStore, request: AnyRequest) -> list[Item]:
    """Return the items of the previous response, then the input's items. Raises ApiError."""
    name = request.previous_response_id
    return [*(store.items(name) if name else []), *store.resolved(input_items(request))]


async def retrieve(models: Models, given: dict[str, str]) -> Response:
    """Return a stored response. given: the fields of RetrieveQuery."""
    query = _decode_query(given, RetrieveQuery)
    if query.stream:
        raise invalid("stream", "got true, expected false: events are not kept")
    body = models.singletons.get(ResponseStore).body(query.response_id)
    return Response(body, media_type="application/json")


async def delete(models: Models, path: dict[str, str]) -> Response:
    """Forget a stored response."""
    models.singletons.get(ResponseStore).remove(path["response_id"])
    return json_response(DeletedResponse(id=path["response_id"]))


async def list_input_items(models: Models, given: dict[str, str]) -> Response:
    """List the input of a stored response, with that of the responses before it.

    given: the fields of InputItemsQuery, and other fields, which change nothing.
    """
    query = _decode_query(given, InputItemsQuery)
    found = models.singletons.get(ResponseStore).input_items(query.response_id)
    suffix = query.response_id.partition("_")[2]
    items = [listed(item, f"item_{suffix}_{number}") for number, item in enumerate(found)]
    if query.order == "desc":
        items.reverse()
    if query.after is not None:
        places = [number for number, item in enumerate(items) if item["id"] == query.after]
        if not places:
            raise invalid("after", f"got {query.after!r:.200}, expected the id of an input item")
        items = items[places[0] + 1 :]
    page = items[: query.limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    has_more = len(items) > len(page)
    return json_response(InputItems(data=page, first_id=first, last_id=last, has_more=has_more))


async def count_input_tokens(state: AppState, request: InputTokensRequest) -> Response:
    """Return the length of the prompt that a response would have."""
    items = conversation(state.singletons.get(ResponseStore), request)
    if not items and request.instructions is None:
        raise invalid("input", "got nothing, expected a text or items")
    tools = offer(request.tools)
    chat = chat_request(request, items, tools)
    number = await count_prompt_tokens(state, chat, partial(name_in_responses, tools))
    return json_response(InputTokens(input_tokens=number))


def begun(request: ResponsesRequest, tools: OfferedTools, model: str) -> ResponseReply:
    """Return a response without output."""
    same = (set(ResponseReply.__struct_fields__) & set(request.__struct_fields__)) - _OWN
    text = request.text
    return ResponseReply(
        **{name: getattr(request, name) for name in same},
        id=f"resp_{uuid.uuid4().hex}",
        created_at=int(time.time()),
        model=model,
        tools=tools.kept,
        reasoning=request.reasoning or Reasoning(),
        text=TextUsed(
            format=text.format or TextFormat(type="text"), verbosity=text.verbosity or "medium"
        ),
        top_logprobs=request.top_logprobs or 0,
    )


def _decode_query(given: dict[str, str], kind: type[Query]) -> Query:
    """Decode parameters of a path and its query; ignore unknown names. Raises ApiError."""
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        path, message = explain(str(error), given, kind)
        raise ApiError(400, message, path) from None


def listed(item: Item, name: str) -> dict[str, Any]:
    """Return an item in OpenAI's form of a list. name: id for an item without an id."""
    listed = {"id": name, "type": item.type, "status": "completed", **msgspec.to_builtins(item)}
    if isinstance(item.content, str):
        kind = "output_text" if item.role == "assistant" else "input_text"
        listed["content"] = [{"type": kind, "text": item.content}]
    for part in listed.get("content", []):
        if part["type"] == "output_text":
            part["annotations"] = []
    return listed


OPERATIONS = [
    Operation("POST", _PATH, respond, ResponseReply, ResponsesRequest, EVENT_STREAM),
    Operation("GET", _STORED, retrieve, ResponseReply),
    Operation("GET", f"{_STORED}/input_items", list_input_items, InputItems),
    Operation("POST", f"{_PATH}/input_tokens", count_input_tokens, InputTokens, InputTokensRequest),
    Operation("DELETE", _STORED, delete, DeletedResponse),
]
