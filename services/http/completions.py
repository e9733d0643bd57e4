"""`/v1/completions`."""

from collections.abc import Iterator

from msgspec import UNSET
from starlette.responses import Response
from starlette.types import Receive

from penstock.protocol.client import GenerateReply, TextDelta
from penstock.services.http.convert import completion_fields, prompts_of
from penstock.services.http.errors import ApiError
from penstock.services.http.generation import Generation, gather
from penstock.services.http.logprobs import completion_logprobs, first_token, prompt_logprobs
from penstock.services.http.replies import (
    CompletionChoiceReply,
    CompletionLogprobs,
    CompletionReply,
    json_response,
)
from penstock.services.http.schema import CompletionRequest
from penstock.services.http.service import Service


async def complete(service: Service, request: CompletionRequest, receive: Receive) -> Response:
    """Writes on from prompts. Raises ApiError, RequestError, ClientDisconnect."""
    prompts = prompts_of(request)
    if not prompts:
        raise ApiError(400, "prompt is empty", "prompt")
    fields = completion_fields(request)
    echoes = await _texts(service, prompts) if request.echo else [""] * len(prompts)
    questions = [{"prompt": prompt, **fields} for prompt in prompts]
    generation = Generation(service, "cmpl", request, questions)
    choices = [
        CompletionChoice(index, echo)
        for index, echo in enumerate(one for one in echoes for _ in range(request.n))
    ]
    if request.stream:
        return generation.stream("text_completion", choices)
    replies = await generation.replies(receive)
    wholes = [
        one.whole(reply, tells_prompt=request.prompt_logprobs is not None)
        for one, reply in zip(choices, replies, strict=True)
    ]
    return json_response(
        CompletionReply(
            id=generation.id,
            object="text_completion",
            created=generation.created,
            model=generation.model,
            choices=wholes,
            usage=generation.usage(replies),
        )
    )


async def _texts(service: Service, prompts: list[str | list[int]]) -> list[str]:
    async def text(prompt: str | list[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        return await service.client.detokenize(prompt)

    return await gather(text(prompt) for prompt in prompts)


class CompletionChoice:
    """One answer, behind its prompt where that is echoed."""

    def __init__(self, index: int, echo: str) -> None:
        self._index = index
        self._echo = echo
        self._num_chars = 0

    def grow(self, delta: TextDelta) -> Iterator[CompletionChoiceReply]:
        """Yields one chunk for new tokens, even without text; the echo comes with the first."""
        text = delta.text if self._num_chars else self._echo + delta.text
        logprobs = completion_logprobs(delta.logprobs, self._num_chars or len(self._echo))
        self._num_chars += len(text)
        if text or delta.token_ids:
            yield CompletionChoiceReply(index=self._index, text=text, logprobs=logprobs)

    def end(self, reply: GenerateReply) -> Iterator[CompletionChoiceReply]:
        """Why it ends."""
        yield CompletionChoiceReply(
            index=self._index,
            text="",
            finish_reason=reply.finish_reason,
            stop_reason=reply.stop_reason,
        )

    def whole(self, reply: GenerateReply, tells_prompt: bool) -> CompletionChoiceReply:
        """A whole answer; tells_prompt: with vLLM's logprobs of the prompt."""
        of_prompt = reply.prompt_logprobs
        return CompletionChoiceReply(
            index=self._index,
            text=self._echo + reply.text,
            logprobs=self._logprobs(reply),
            finish_reason=reply.finish_reason,
            stop_reason=reply.stop_reason,
            prompt_logprobs=prompt_logprobs(of_prompt) if tells_prompt and of_prompt else UNSET,
        )

    def _logprobs(self, reply: GenerateReply) -> CompletionLogprobs | None:
        if reply.logprobs is None or not self._echo or not reply.prompt_logprobs:
            return completion_logprobs(reply.logprobs, len(self._echo))
        first = first_token(self._echo, reply.prompt_logprobs)
        return completion_logprobs([*reply.prompt_logprobs[1:], *reply.logprobs], 0, first)
