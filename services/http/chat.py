"""`/v1/chat/completions`."""

from collections.abc import Iterator

from msgspec import UNSET
from starlette.responses import Response
from starlette.types import Receive

from penstock.protocol.messages.client import GenerateReply, TextDelta
from penstock.services.http.app_state import AppState
from penstock.services.http.generation import Generation
from penstock.services.http.logprobs import chat_logprobs, prompt_logprobs
from penstock.services.http.reasoning import ReasoningSplitter
from penstock.services.http.replies import (
    CalledFunction,
    CalledTool,
    ChatChoiceReply,
    ChatChunk,
    ChatReply,
    Delta,
    ReplyMessage,
    json_response,
)
from penstock.services.http.schema import ChatRequest
from penstock.services.http.to_generate_request import chat_fields, truncated
from penstock.services.http.tool_calls import ContentPiece, Piece, ToolCallDelta, ToolCallParser
from penstock.services.http.tool_choice import is_forced


async def chat(state: AppState, request: ChatRequest, receive: Receive) -> Response:
    """Answers a conversation. Raises ApiError, RequestError, ClientDisconnect."""
    question = truncated(chat_fields(request, state.tags_are_tokens), state.max_model_len)
    generation = Generation(state, "chatcmpl", request, [question])
    choices = [ChatChoice(index, request) for index in range(request.n)]
    if request.stream:
        return generation.stream("chat.completion.chunk", choices)
    replies = await generation.replies(receive)
    prompt_token_ids, *_ = await generation.prompt_token_ids()
    of_prompt = replies[0].prompt_logprobs
    return json_response(
        ChatReply(
            object="chat.completion",
            **generation.head,
            choices=[one.whole(reply) for one, reply in zip(choices, replies, strict=True)],
            usage=generation.usage(replies),
            prompt_logprobs=UNSET if of_prompt is None else prompt_logprobs(of_prompt),
            prompt_token_ids=UNSET if prompt_token_ids is None else prompt_token_ids,
        )
    )


class ChatChoice:
    """One answer: thinking, content and tool calls, told from its text."""

    def __init__(self, index: int, request: ChatRequest) -> None:
        self._index = index
        self._splitter = ReasoningSplitter()
        has_tools = bool(request.tools) and request.tool_choice != "none"
        self._parser = ToolCallParser(is_forced(request)) if has_tools else None
        self._may_call_twice = request.parallel_tool_calls
        self._shows_reasoning = request.include_reasoning
        self._shows_token_ids = request.return_token_ids
        self._names_token_ids = request.return_tokens_as_token_ids
        self._has_calls = False
        self.prompt_token_ids: list[int] | None = None

    def begin(self, delta: TextDelta) -> Iterator[ChatChunk]:
        """Yield the role."""
        self._splitter = ReasoningSplitter(delta.starts_reasoning)
        yield ChatChunk(index=self._index, delta=Delta(role="assistant", content=""))

    def grow(self, delta: TextDelta) -> Iterator[ChatChunk]:
        """Yield at least one chunk for new tokens: empty `content` for tokens without text.

        So clients see when each token came. Logprobs and token ids are in the first chunk.
        """
        deltas = list(self._deltas(*self._splitter.feed(delta.text)))
        logprobs = chat_logprobs(delta.logprobs, self._names_token_ids)
        token_ids = delta.token_ids if self._shows_token_ids else UNSET
        if delta.token_ids and not deltas:
            deltas = [Delta(content="")]
        for one in deltas:
            yield ChatChunk(index=self._index, delta=one, logprobs=logprobs, token_ids=token_ids)
            logprobs, token_ids = None, UNSET

    def end(self, reply: GenerateReply) -> Iterator[ChatChunk]:
        """What was held back, and why it ends."""
        for one in self._finish(reply):
            yield ChatChunk(index=self._index, delta=one)
        yield ChatChunk(
            index=self._index,
            delta=Delta(),
            finish_reason=self._finish_reason(reply),
            stop_reason=reply.stop_reason,
        )

    def whole(self, reply: GenerateReply) -> ChatChoiceReply:
        """The same from a whole answer."""
        self._splitter = ReasoningSplitter(reply.starts_reasoning)
        deltas = [*self._deltas(*self._splitter.feed(reply.text)), *self._finish(reply)]
        content = "".join(one.content or "" for one in deltas)
        reasoning = "".join(one.reasoning_content or "" for one in deltas)
        calls = _join_calls([call for one in deltas for call in one.tool_calls or []])
        return ChatChoiceReply(
            index=self._index,
            message=ReplyMessage(
                role="assistant",
                content=content if content or not calls else None,
                reasoning=reasoning or UNSET,
                reasoning_content=reasoning or UNSET,
                tool_calls=calls or UNSET,
            ),
            logprobs=chat_logprobs(reply.logprobs, self._names_token_ids),
            finish_reason=self._finish_reason(reply),
            stop_reason=reply.stop_reason,
            token_ids=reply.token_ids if self._shows_token_ids else UNSET,
        )

    def _deltas(self, reasoning: str, content: str) -> Iterator[Delta]:
        if reasoning and self._shows_reasoning:
            yield Delta(reasoning=reasoning, reasoning_content=reasoning)
        if self._parser:
            yield from map(self._delta, self._wanted(self._parser.feed(content)))
        elif content:
            yield Delta(content=content)

    def _finish(self, reply: GenerateReply) -> Iterator[Delta]:
        yield from self._deltas(*self._splitter.finish())
        if self._parser:
            yield from map(
                self._delta, self._wanted(self._parser.finish(reply.finish_reason != "stop"))
            )

    def _wanted(self, pieces: list[Piece]) -> Iterator[Piece]:
        """All but calls behind the first where they are not to be parallel."""
        for piece in pieces:
            if self._may_call_twice or isinstance(piece, ContentPiece) or piece.index == 0:
                yield piece

    def _delta(self, piece: Piece) -> Delta:
        if isinstance(piece, ContentPiece):
            return Delta(content=piece.text)
        self._has_calls = True
        return Delta(tool_calls=[_called(piece)])

    def _finish_reason(self, reply: GenerateReply) -> str:
        is_call = self._has_calls and reply.finish_reason == "stop"
        return "tool_calls" if is_call else reply.finish_reason


def _called(piece: ToolCallDelta) -> CalledTool:
    return CalledTool(
        index=piece.index,
        id=piece.id,
        type="function" if piece.id else None,
        function=CalledFunction(name=piece.name, arguments=piece.arguments),
    )


def _join_calls(pieces: list[CalledTool]) -> list[CalledTool]:
    """The calls that a stream's pieces add up to."""
    calls: list[CalledTool] = []
    for piece in pieces:
        if piece.id:
            piece.index = UNSET
            calls.append(piece)
        else:
            calls[-1].function.arguments += piece.function.arguments
    return calls
