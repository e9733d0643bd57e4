"""Chats: `/v1/chat/completions`, and the events of other APIs that are built on chats."""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, Literal

from msgspec import UNSET
from starlette.responses import Response

from penstock.protocol.messages.client import GenerateReply, TextDelta
from penstock.protocol.tokenizer_file import END_THINK
from penstock.services.http.generation.generation import Generation, chat_logprobs, prompt_logprobs
from penstock.services.http.generation.schema import (
    CalledTool,
    ChatChoiceReply,
    ChatChunk,
    ChatReply,
    ChatRequest,
    Delta,
    ReplyMessage,
)
from penstock.services.http.generation.to_generate_request import (
    chat_fields,
    prompt_fields,
    truncated,
)
from penstock.services.http.generation.tool_calls import Piece, ToolCallParser, make_parser
from penstock.services.http.generation.tool_grammar import is_forced
from penstock.services.http.shared.access import caller
from penstock.services.http.shared.app_state import (
    EVENT_STREAM,
    HERMES,
    AppState,
    Operation,
    ToolFormat,
)
from penstock.services.http.shared.errors import FieldAsSent, fields_as_sent, json_response
from penstock.services.http.shared.event_stream import EventForm

Event = dict[str, Any]
PartKind = Literal["reasoning", "text", "call"]


class ReasoningSplitter:
    """Splitter of an answer of Qwen3: `<think>\\n…\\n</think>\\n\\nanswer`.

    The detokenizer has found the tokens of the tags. Newlines next to the tags belong to neither
    part. Newlines at the end of reasoning, and white space before all text, are held back.
    """

    def __init__(self) -> None:
        self._held = ""
        self._position = 0  # index of the held text in the request's text
        self._end: int | None = None
        self._is_reasoning = self._skips_newlines = False
        self.is_answer = False  # True if all further text belongs to the answer

    def feed(self, text: str, begin: int | None, end: int | None) -> tuple[str, str]:
        """Return the reasoning and the answer that `text` adds; each may be empty.

        begin, end: `reasoning_begin` and `reasoning_end` of the message with the text.
        """
        # a long run of newlines would be examined again with each piece
        is_run = end is None and not (self._held[-1:] + text).strip("\n")
        self._held += text
        self._end = end
        if not (self._is_reasoning or self.is_answer):
            self._start(begin)
        if self._is_reasoning and not is_run:
            return self._split(is_last=False)
        return "", self._take(len(self._held)) if self.is_answer else ""

    def finish(self) -> tuple[str, str]:
        """Return the held text, without newlines at the end of reasoning."""
        if self._is_reasoning:
            return self._split(is_last=True)
        self.is_answer = True
        return "", self._take(len(self._held))

    def _start(self, begin: int | None) -> None:
        if begin is None:
            self.is_answer = bool(self._held.strip())
        elif begin <= len(self._held):
            self._take(begin)
            self._is_reasoning = self._skips_newlines = True

    def _split(self, is_last: bool) -> tuple[str, str]:
        length = len(self._held) if self._end is None else self._end - self._position
        inside, after = self._held[:length], self._held[length:]
        has_ended = self._end is not None and length <= len(self._held)
        reasoning = self._take(len(inside.rstrip("\n")))
        if not has_ended or (not is_last and after != END_THINK and END_THINK.startswith(after)):
            return reasoning, ""
        self._held, self._skips_newlines = after.removeprefix(END_THINK), True
        self._is_reasoning, self.is_answer = False, True
        return reasoning, self._take(len(self._held))

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        self._position += length
        if self._skips_newlines:
            taken = taken.lstrip("\n")
            self._skips_newlines = not taken
        return taken


class ReasoningCalls:
    """Holder of tool calls before `</think>`, whose meaning only later text shows.

    Calls before a later `</think>` are part of the reasoning. Without a later `</think>`, the first
    call has ended the reasoning: all calls are calls of the answer, and text after the first call
    is the answer.
    """

    def __init__(self, parser: ToolCallParser) -> None:
        self._parser = parser
        self.held = ""  # text that is reasoning if `</think>` follows
        self._pieces: list[Piece] = []  # pieces of the held text from its first call on

    def feed(self, reasoning: str) -> str:
        """Return new and held reasoning up to a possible call."""
        self.held += reasoning
        return self._release(self._parser.feed(reasoning))

    def finish(self, is_cut: bool) -> tuple[str, list[Piece]]:
        """Return the end of the reasoning, and the pieces after it. is_cut: as in the parser."""
        return self._release(self._parser.finish(is_cut)), self._pieces

    def _release(self, pieces: list[Piece]) -> str:
        """Keep the pieces from the first call on. Return the text before the first call."""
        text = ""
        for piece in pieces:
            if isinstance(piece, str) and not self._pieces:
                text += piece
            else:
                self._pieces.append(piece)
        self.held = self.held[len(text) :]
        return text


async def chat(state: AppState, request: ChatRequest) -> Response:
    """Answer a conversation."""
    generation = submit_chat(state, "chatcmpl", request)
    choices = [ChatChoice(index, request, state.tool_format) for index in range(request.n)]
    if request.stream:
        return generation.stream("chat.completion.chunk", choices)
    replies = await generation.replies()
    prompt_token_ids, *_ = await generation.prompt_token_ids()
    of_prompt = replies[0].prompt_logprobs
    return json_response(
        ChatReply(
            object="chat.completion",
            **generation.head,
            choices=[choice.whole(reply) for choice, reply in zip(choices, replies, strict=True)],
            usage=generation.usage(replies),
            prompt_logprobs=None if of_prompt is None else prompt_logprobs(of_prompt),
            prompt_token_ids=prompt_token_ids,
        )
    )


def submit_chat(
    state: AppState, kind: str, request: ChatRequest, field_as_sent: FieldAsSent = str
) -> Generation:
    """Submit a conversation; the parameters are those of Generation.

    Raises ApiError and MessageError.
    """
    with fields_as_sent(field_as_sent):
        prompt = truncated(chat_fields(request, state.tool_format), state.max_model_len)
        return Generation(state, kind, request, [prompt], field_as_sent)


async def count_prompt_tokens(
    state: AppState, request: ChatRequest, field_as_sent: FieldAsSent
) -> int:
    """Return the length of a conversation's prompt. Raises ApiError, MessageError, RequestError."""
    with fields_as_sent(field_as_sent):
        fields = truncated(chat_fields(request, state.tool_format), state.max_model_len)
        reply = await state.client.tokenize(**prompt_fields(fields), client=caller.get().client)
    return len(reply.token_ids)


class ChatChoice:
    """One answer: reasoning, content and tool calls, parsed from its text.

    Other APIs convert the pieces that `deltas` yields, instead of `chunks` and `whole`.
    """

    def __init__(self, index: int, request: ChatRequest, form: ToolFormat = HERMES) -> None:
        self._index = index
        self._request = request
        self._splitter = ReasoningSplitter()
        self._is_begun = False
        has_tools = bool(request.tools) and request.tool_choice != "none"
        schemas = {tool.function.name: tool.function.parameters or {} for tool in request.tools}
        forced = is_forced(request)
        self._parser = make_parser(form.name, schemas, forced) if has_tools else None
        # set until the answer begins; a forced call comes after reasoning
        self._reasoning_calls: ReasoningCalls | None = None
        if has_tools and not forced and form.name != "json":
            self._reasoning_calls = ReasoningCalls(make_parser(form.name, schemas))
        self._has_calls = False
        self.prompt_token_ids: list[int] | None = None

    def chunks(self, delta: TextDelta | None, reply: GenerateReply | None) -> Iterator[ChatChunk]:
        """Yield the chunks of new tokens, or no chunk if the tokens have no text yet.

        Logprobs and token ids are in the first chunk, the finish reason is in the last chunk.
        """
        if not self._is_begun:
            self._is_begun = True
            yield ChatChunk(index=self._index, delta=Delta(role="assistant", content=""))
        deltas = list(self.deltas(delta, reply))
        if not deltas and delta and delta.token_ids:
            is_needed = reply or delta.logprobs or self._request.has_tokens_in_chunks
            deltas = [Delta(content="")] if is_needed else []
        elif not deltas and reply:
            deltas = [Delta()]
        chunks = [ChatChunk(index=self._index, delta=delta) for delta in deltas]
        if chunks and delta:
            names_ids = self._request.return_tokens_as_token_ids
            chunks[0].logprobs = chat_logprobs(delta.logprobs, names_ids)
            chunks[0].token_ids = delta.token_ids if self._request.return_token_ids else UNSET
        if reply:
            chunks[-1].finish_reason = self.finish_reason(reply)
            chunks[-1].stop_reason = reply.stop_reason
        yield from chunks

    def whole(self, reply: GenerateReply) -> ChatChoiceReply:
        deltas = list(self.deltas(reply, reply))
        content = "".join(delta.content or "" for delta in deltas)
        reasoning = "".join(delta.reasoning_content or "" for delta in deltas)
        calls = _join_calls([call for delta in deltas for call in delta.tool_calls or []])
        return ChatChoiceReply(
            index=self._index,
            message=ReplyMessage(
                role="assistant",
                content=content if content or not calls else None,
                reasoning=reasoning or None,
                reasoning_content=reasoning or None,
                tool_calls=calls or UNSET,
            ),
            logprobs=chat_logprobs(reply.logprobs, self._request.return_tokens_as_token_ids),
            finish_reason=self.finish_reason(reply),
            stop_reason=reply.stop_reason,
            token_ids=reply.token_ids if self._request.return_token_ids else None,
        )

    def deltas(
        self, new: TextDelta | GenerateReply | None, reply: GenerateReply | None
    ) -> Iterator[Delta]:
        """Yield the pieces of `new` text, and with the reply the pieces that were held back.

        A piece is reasoning, content or a piece of a tool call. For a whole answer, `new` and
        `reply` are both given.
        """
        if new:
            split = self._splitter.feed(new.text, new.reasoning_begin, new.reasoning_end)
            yield from self._parsed(*split)
        if reply:
            yield from self._parsed(*self._splitter.finish())
            is_cut = reply.finish_reason != "stop"
            if self._reasoning_calls:
                reasoning, pieces = self._reasoning_calls.finish(is_cut)
                yield from self._reasoned(reasoning)
                yield from self._wanted(pieces)
            if self._parser:
                yield from self._wanted(self._parser.finish(is_cut))

    def _parsed(self, reasoning: str, content: str) -> Iterator[Delta]:
        if self._reasoning_calls:
            reasoning = self._reasoning_calls.feed(reasoning)
            if self._splitter.is_answer:
                reasoning += self._reasoning_calls.held
                self._reasoning_calls = None
        yield from self._reasoned(reasoning)
        if self._parser:
            yield from self._wanted(self._parser.feed(content))
        elif content:
            yield Delta(content=content)

    def _reasoned(self, reasoning: str) -> Iterator[Delta]:
        if reasoning and self._request.include_reasoning:
            yield Delta(reasoning=reasoning, reasoning_content=reasoning)

    def _wanted(self, pieces: list[Piece]) -> Iterator[Delta]:
        """Yield the pieces, without calls after the first if calls must not be parallel."""
        for piece in pieces:
            if isinstance(piece, str):
                yield Delta(content=piece)
            elif self._request.parallel_tool_calls or piece.index == 0:
                self._has_calls = True
                yield Delta(tool_calls=[piece])

    def finish_reason(self, reply: GenerateReply) -> str:
        """Return OpenAI's finish reason, after `deltas` was exhausted with the reply."""
        is_call = self._has_calls and reply.finish_reason == "stop"
        return "tool_calls" if is_call else reply.finish_reason


class ChatEvents(EventForm):
    """Converter of a chat's only answer to the events of another API, which fill its reply.

    The answer is a list of parts: reasoning, texts and calls. Whole answers are converted in the
    same way.
    """

    def __init__(self, choice: ChatChoice, reply: Any, parts: list[Any]) -> None:
        """Start without parts. parts: the reply's list, to which parts are added."""
        self._choice = choice
        self.reply = reply
        self._parts = parts
        self._is_started = False
        self._kind: PartKind | None = None  # kind of the last part, while the part is open
        self._texts: list[str] = []  # texts of the open part

    async def response(self, generation: Generation, is_stream: bool) -> Response:
        """Return a stream of the events, or the reply that the events fill."""
        if is_stream:
            return generation.stream_events(self, self.events)
        (answer,) = await generation.replies()
        return json_response(self.whole(answer))

    def events(
        self, new: TextDelta | GenerateReply | None, reply: GenerateReply | None
    ) -> Iterator[Event]:
        """Yield the events of new tokens, and with the reply the last events.

        For a whole answer, `new` and `reply` are both given.
        """
        if not self._is_started:
            self._is_started = True
            yield from self._start(new or reply)
        for delta in self._choice.deltas(new, reply):
            if delta.reasoning:
                yield from self._piece("reasoning", delta.reasoning)
            elif delta.content:
                yield from self._piece("text", delta.content)
            for call in delta.tool_calls or ():
                yield from self._piece("call", call.function.arguments, call)
        if reply:
            yield from self._end(reply)

    def whole(self, answer: GenerateReply) -> Any:
        """Return the complete reply, filled by the events of a whole answer."""
        for _ in self.events(answer, answer):
            pass
        return self.reply

    def _piece(self, kind: PartKind, text: str, call: CalledTool | None = None) -> Iterator[Event]:
        """Yield the events of one piece, which may end a part and begin another part."""
        if kind != self._kind or (call and call.id):
            yield from self._begin(kind, call)
        if text:
            self._texts.append(text)
            yield self._added(kind, text)

    def _begin(self, kind: PartKind, call: CalledTool | None = None) -> Iterator[Event]:
        yield from self._close()
        self._kind, self._texts = kind, []
        self._parts.append(self._new_part(kind, call))
        yield from self._begun(self._parts[-1])

    def _close(self, is_whole: bool = True) -> Iterator[Event]:
        """Yield the events that end the open part. is_whole: the answer was not cut off in it."""
        if self._kind:
            self._kind = None
            yield from self._closed(self._parts[-1], "".join(self._texts), is_whole)

    @abstractmethod
    def _start(self, first: TextDelta | GenerateReply | None) -> Iterator[Event]:
        """Yield the events before all parts. first: message with the counts of the prompt."""

    @abstractmethod
    def _new_part(self, kind: PartKind, call: CalledTool | None) -> Any:
        """Return an empty part."""

    @abstractmethod
    def _begun(self, part: Any) -> Iterator[Event]:
        """Yield the events of a new part."""

    @abstractmethod
    def _added(self, kind: PartKind, text: str) -> Event:
        """Return the event of more text in the open part."""

    @abstractmethod
    def _closed(self, part: Any, text: str, is_whole: bool) -> Iterator[Event]:
        """Put the text into a part, and yield the events of its end."""

    @abstractmethod
    def _end(self, reply: GenerateReply) -> Iterator[Event]:
        """Complete the reply, and yield the last events."""


def _join_calls(pieces: list[CalledTool]) -> list[CalledTool]:
    """Join the pieces of a stream's calls to whole calls."""
    calls: list[CalledTool] = []
    for piece in pieces:
        if piece.id:
            piece.index = UNSET
            calls.append(piece)
        else:
            calls[-1].function.arguments += piece.function.arguments
    return calls


OPERATIONS = [
    Operation("POST", "/v1/chat/completions", chat, ChatReply, ChatRequest, EVENT_STREAM),
]
