"""`/v1/completions`."""

from collections.abc import Iterator
from typing import Any

from msgspec import UNSET, UnsetType
from starlette.responses import Response
from starlette.types import Receive

from penstock.protocol.messages.client import GenerateReply, TextDelta
from penstock.services.http.access import caller
from penstock.services.http.app_state import AppState
from penstock.services.http.errors import ApiError
from penstock.services.http.generation import Generation, gather
from penstock.services.http.logprobs import completion_logprobs, echoed_logprobs, prompt_logprobs
from penstock.services.http.replies import (
    CompletionChoiceReply,
    CompletionLogprobs,
    CompletionReply,
    json_response,
)
from penstock.services.http.schema import CompletionRequest
from penstock.services.http.to_generate_request import completion_fields, prompts_of, truncated


async def complete(state: AppState, request: CompletionRequest, receive: Receive) -> Response:
    """Writes on from prompts. Raises ApiError, RequestError, ClientDisconnect."""
    prompts = prompts_of(request)
    if not prompts:
        raise ApiError(400, "prompt is empty", "prompt")
    fields = truncated(completion_fields(request), state.max_model_len)
    questions = [{"prompt": prompt, **fields} for prompt in prompts]
    echoes = await _texts(state, questions) if request.echo else [""] * len(prompts)
    generation = Generation(state, "cmpl", request, questions)
    choices = [
        CompletionChoice(index, request, echo)
        for index, echo in enumerate(one for one in echoes for _ in range(request.n))
    ]
    if request.stream:
        return generation.stream("text_completion", choices)
    replies = await generation.replies(receive)
    prompt_token_ids = await generation.prompt_token_ids()
    for choice, token_ids in zip(choices, prompt_token_ids, strict=True):
        choice.prompt_token_ids = token_ids
    return json_response(
        CompletionReply(
            object="text_completion",
            **generation.head,
            choices=[one.whole(reply) for one, reply in zip(choices, replies, strict=True)],
            usage=generation.usage(replies),
        )
    )


async def _texts(state: AppState, questions: list[dict[str, Any]]) -> list[str]:
    """The texts of prompts, as far as they are not cut off. Raises RequestError."""

    async def text(prompt: str | list[int], **fields: Any) -> str:
        if fields["truncate_prompt_tokens"] is not None:
            names = ("add_special_tokens", "truncate_prompt_tokens", "truncation_side")
            options = {name: fields[name] for name in names}
            options["client"] = caller.get().client
            prompt = (await state.client.tokenize(prompt, **options)).token_ids
        if isinstance(prompt, str):
            return prompt
        return await state.client.detokenize(prompt, client=caller.get().client)

    return await gather(text(**question) for question in questions)


class CompletionChoice:
    """One answer, after its prompt where that is echoed."""

    def __init__(self, index: int, request: CompletionRequest, echo: str = "") -> None:
        self._index = index
        self._echo = echo
        self._to_echo = echo
        self._shows_token_ids = request.return_token_ids
        self._names_token_ids = request.return_tokens_as_token_ids
        self._shows_prompt_logprobs = request.prompt_logprobs is not None
        self.prompt_token_ids: list[int] | None = None

    def begin(self, _: TextDelta) -> Iterator[CompletionChoiceReply]:
        """Yield nothing."""
        yield from ()

    def grow(self, delta: TextDelta) -> Iterator[CompletionChoiceReply]:
        """Yields one chunk for new tokens, even without text; the echo comes with the first."""
        text, self._to_echo = self._to_echo + delta.text, ""
        logprobs = completion_logprobs(delta.logprobs, len(self._echo), self._names_token_ids)
        if text or delta.token_ids:
            yield CompletionChoiceReply(
                index=self._index,
                text=text,
                logprobs=logprobs,
                token_ids=delta.token_ids if self._shows_token_ids else UNSET,
                prompt_token_ids=self._take_prompt(),
            )

    def end(self, reply: GenerateReply) -> Iterator[CompletionChoiceReply]:
        """Why it ends."""
        yield CompletionChoiceReply(
            index=self._index,
            text="",
            finish_reason=reply.finish_reason,
            stop_reason=reply.stop_reason,
        )

    def whole(self, reply: GenerateReply) -> CompletionChoiceReply:
        """A whole answer, with vLLM's logprobs of the prompt where the client wants them."""
        of_prompt = reply.prompt_logprobs if self._shows_prompt_logprobs else None
        return CompletionChoiceReply(
            index=self._index,
            text=self._echo + reply.text,
            logprobs=self._logprobs(reply),
            finish_reason=reply.finish_reason,
            stop_reason=reply.stop_reason,
            prompt_logprobs=prompt_logprobs(of_prompt) if of_prompt else UNSET,
            token_ids=reply.token_ids if self._shows_token_ids else UNSET,
            prompt_token_ids=self._take_prompt(),
        )

    def _take_prompt(self) -> list[int] | UnsetType:
        """In the first piece only."""
        taken, self.prompt_token_ids = self.prompt_token_ids, None
        return UNSET if taken is None else taken

    def _logprobs(self, reply: GenerateReply) -> CompletionLogprobs | None:
        names_ids = self._names_token_ids
        if reply.logprobs is None or not self._echo or not reply.prompt_logprobs:
            return completion_logprobs(reply.logprobs, len(self._echo), names_ids)
        logprobs = echoed_logprobs(self._echo, reply.prompt_logprobs, names_ids)
        output = completion_logprobs(reply.logprobs, len(self._echo), names_ids)
        for name in CompletionLogprobs.__struct_fields__:
            getattr(logprobs, name).extend(getattr(output, name))
        return logprobs
