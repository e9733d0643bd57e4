"""`/v1/completions`."""

from collections.abc import Iterator
from typing import Any

from msgspec import UNSET, structs
from starlette.responses import Response

from penstock.protocol.client.session import gather
from penstock.protocol.messages.client import GenerateReply, TextDelta, TokenLogprobs
from penstock.services.http.generation.generation import (
    Generation,
    check_number,
    completion_logprobs,
    echoed_logprobs,
    prompt_logprobs,
)
from penstock.services.http.generation.schema import (
    CompletionChoiceReply,
    CompletionChunk,
    CompletionLogprobs,
    CompletionReply,
    CompletionRequest,
)
from penstock.services.http.generation.to_generate_request import (
    completion_fields,
    prompts_of,
    truncated,
)
from penstock.services.http.shared.access import caller
from penstock.services.http.shared.app_state import EVENT_STREAM, AppState, Operation
from penstock.services.http.shared.errors import json_response


async def complete(state: AppState, request: CompletionRequest) -> Response:
    """Continue prompts."""
    given = prompts_of(request.prompt)
    check_number(state, len(given), request.n)  # before fields and echoes are computed
    fields = truncated(completion_fields(request), state.max_model_len)
    prompts = [{"prompt": prompt, **fields} for prompt in given]
    echoes = await _texts(state, prompts) if request.echo else [""] * len(prompts)
    generation = Generation(state, "cmpl", request, prompts)
    choices = [
        CompletionChoice(index, request, echo)
        for index, echo in enumerate(echo for echo in echoes for _ in range(request.n))
    ]
    if request.stream:
        return generation.stream("text_completion", choices)
    replies = await generation.replies()
    for choice, token_ids in zip(choices, await generation.prompt_token_ids(), strict=True):
        choice.prompt_token_ids = token_ids
    return json_response(
        CompletionReply(
            object="text_completion",
            **generation.head,
            choices=[choice.whole(reply) for choice, reply in zip(choices, replies, strict=True)],
            usage=generation.usage(replies),
        )
    )


async def _texts(state: AppState, prompts: list[dict[str, Any]]) -> list[str]:
    """Return the texts of prompts after their truncation. Raises RequestError."""

    async def text(prompt: str | list[int], **fields: Any) -> str:
        if fields["truncate_prompt_tokens"] is not None:
            names = ("add_special_tokens", "truncate_prompt_tokens", "truncation_side")
            given = {name: fields[name] for name in names}
            reply = await state.client.tokenize(prompt, **given, client=caller.get().client)
            prompt = reply.token_ids
        if isinstance(prompt, str):
            return prompt
        return await state.client.detokenize(prompt, client=caller.get().client)

    return await gather(text(**prompt) for prompt in prompts)


class CompletionChoice:
    """One answer, after its prompt if the prompt is echoed."""

    def __init__(self, index: int, request: CompletionRequest, echo: str = "") -> None:
        self._index = index
        self._request = request
        self._echo = echo
        self._is_begun = False
        self.prompt_token_ids: list[int] | None = None

    def chunks(
        self, delta: TextDelta | None, reply: GenerateReply | None
    ) -> Iterator[CompletionChunk]:
        """Yield a chunk, also for tokens without text, as vLLM; the first chunk has the echo."""
        piece = self._piece(delta, reply)
        if piece.text or delta or reply:
            yield piece

    def whole(self, reply: GenerateReply) -> CompletionChoiceReply:
        """Return the whole answer."""
        piece = structs.asdict(self._piece(reply, reply))
        given = {name: value for name, value in piece.items() if value is not UNSET}
        return CompletionChoiceReply(**given)

    def _piece(
        self, new: TextDelta | GenerateReply | None, reply: GenerateReply | None
    ) -> CompletionChunk:
        """Return the next piece. The first piece has the data of the prompt."""
        first = None if self._is_begun else new or reply
        new = new or first
        piece = CompletionChunk(index=self._index, text=new.text if new else "")
        if new:
            names_ids = self._request.return_tokens_as_token_ids
            piece.logprobs = completion_logprobs(new.logprobs, len(self._echo), names_ids)
            piece.token_ids = new.token_ids if self._request.return_token_ids else UNSET
        if first:
            self._is_begun = True
            self._add_prompt(piece, first.prompt_logprobs or [])
        if reply:
            piece.finish_reason, piece.stop_reason = reply.finish_reason, reply.stop_reason
        return piece

    def _add_prompt(self, piece: CompletionChunk, of_prompt: list[TokenLogprobs | None]) -> None:
        """Put the echo before a piece, and add its ids and vLLM's logprobs if requested."""
        piece.text = self._echo + piece.text
        if self.prompt_token_ids is not None:
            piece.prompt_token_ids = self.prompt_token_ids
        if self._request.prompt_logprobs is not None and of_prompt:
            piece.prompt_logprobs = prompt_logprobs(of_prompt)
        if piece.logprobs and self._echo and of_prompt:
            names_ids = self._request.return_tokens_as_token_ids
            logprobs = echoed_logprobs(self._echo, of_prompt, names_ids)
            for name in CompletionLogprobs.__struct_fields__:
                getattr(logprobs, name).extend(getattr(piece.logprobs, name))
            piece.logprobs = logprobs


OPERATIONS = [
    Operation(
        "POST", "/v1/completions", complete, CompletionReply, CompletionRequest, EVENT_STREAM
    ),
]
