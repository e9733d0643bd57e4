"""`/v1/chat/completions`."""

from collections.abc import Iterator

from msgspec import UNSET
from starlette.responses import Response

from penstock.protocol.messages.client import GenerateReply, TextDelta
from penstock.services.http.generation.generation import Generation
from penstock.services.http.generation.logprobs import chat_logprobs, prompt_logprobs
from penstock.services.http.generation.reasoning_splitter import (
    ReasoningCalls,
    ReasoningSplitter,
)
from penstock.services.http.generation.replies import (
    CalledTool,
    ChatChoiceReply,
    ChatChunk,
    ChatReply,
    Delta,
    ReplyMessage,
)
from penstock.services.http.generation.schema import ChatRequest
from penstock.services.http.generation.to_generate_request import (
    chat_fields,
    prompt_fields,
    truncated,
)
from penstock.services.http.generation.tool_call_parser import Piece, make_parser
from penstock.services.http.generation.tool_grammar import is_forced
from penstock.services.http.shared.access import caller
from penstock.services.http.shared.app_state import AppState
from penstock.services.http.shared.errors import FieldAsSent, fields_as_sent
from penstock.services.http.shared.json_response import json_response
from penstock.services.http.shared.tool_format import HERMES, ToolFormat


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
            choices=[one.whole(reply) for one, reply in zip(choices, replies, strict=True)],
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
        schemas = {one.function.name: one.function.parameters or {} for one in request.tools}
        forced = is_forced(request)
        self._parser = make_parser(form.name, schemas, forced) if has_tools else None
        # until the answer begins; a forced call comes after reasoning
        self._reasoning_calls: ReasoningCalls | None = None
        if has_tools and not forced and form.name != "json":
            self._reasoning_calls = ReasoningCalls(make_parser(form.name, schemas))
        self._has_calls = False
        self.prompt_token_ids: list[int] | None = None

    def chunks(self, delta: TextDelta | None, reply: GenerateReply | None) -> Iterator[ChatChunk]:
        """Yield the chunks of new tokens; none where the tokens say nothing yet.

        Logprobs and token ids are in the first chunk, the finish reason is in the last one.
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
        chunks = [ChatChunk(index=self._index, delta=one) for one in deltas]
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
        content = "".join(one.content or "" for one in deltas)
        reasoning = "".join(one.reasoning_content or "" for one in deltas)
        calls = _join_calls([call for one in deltas for call in one.tool_calls or []])
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
        """Yield the pieces of `new` text, and with the reply those that were held back.

        A piece is reasoning, content or one piece of a tool call. A whole answer is `new` and
        `reply` at once.
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
                reasoning += self._reasoning_calls.give_back()
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
        """Yield all except calls after the first where calls must not be parallel."""
        for piece in pieces:
            if isinstance(piece, str):
                yield Delta(content=piece)
            elif self._request.parallel_tool_calls or piece.index == 0:
                self._has_calls = True
                yield Delta(tool_calls=[piece])

    def finish_reason(self, reply: GenerateReply) -> str:
        """Return OpenAI's reason, after `deltas` was exhausted with the reply."""
        is_call = self._has_calls and reply.finish_reason == "stop"
        return "tool_calls" if is_call else reply.finish_reason


def _join_calls(pieces: list[CalledTool]) -> list[CalledTool]:
    """Return the calls that a stream's pieces add up to."""
    calls: list[CalledTool] = []
    for piece in pieces:
        if piece.id:
            piece.index = UNSET
            calls.append(piece)
        else:
            calls[-1].function.arguments += piece.function.arguments
    return calls
