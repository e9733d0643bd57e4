"""`use_beam_search`, as in vLLM: `n` beams for each prompt, whose logprobs decide."""

from functools import cache
from pathlib import Path
from typing import Any

from msgspec import structs

from penstock.protocol.client.answers import gather
from penstock.protocol.client.async_client import AsyncStream
from penstock.protocol.client.beam_search import MAX_WIDTH, Beam, BeamSearch, BeamSearchParams
from penstock.protocol.messages.client import (
    GenerateReply,
    GenerateRequest,
    TokenizeReply,
)
from penstock.protocol.messages.logprobs import TokenLogprobs
from penstock.protocol.messages.sampling import SamplingParams
from penstock.protocol.tokenizer_file import read_eos_token_ids
from penstock.services.http.generation.generation import Generation
from penstock.services.http.generation.schema import ApiRequest, ChatRequest
from penstock.services.http.generation.to_generate_request import name_as_sent, prompt_fields
from penstock.services.http.generation.tool_grammar import is_forced
from penstock.services.http.shared.access import caller
from penstock.services.http.shared.app_state import AppState
from penstock.services.http.shared.errors import ApiError, FieldAsSent, fields_as_sent, invalid

_WITH = "with use_beam_search"
_DEFAULTS = SamplingParams()
_USED = {"n", "max_tokens", "ignore_eos", "include_stop_str_in_output", "logprobs"}
_USED |= {"skip_special_tokens"}
_OF_NOISE = {"temperature", "top_k", "top_p", "min_p", "seed", "speculative"}
"""change nothing: a search draws no tokens"""
_NEUTRAL: dict[str, Any] = {"repetition_penalty": 1.0, "stop": []}
"""further values that change nothing"""
_REFUSED = [one for one in SamplingParams.__struct_fields__ if one not in _USED | _OF_NOISE]


def make_generation(
    state: AppState,
    kind: str,
    request: ApiRequest,
    prompts: list[dict[str, Any]],
    field_as_sent: FieldAsSent = str,
) -> Generation:
    """Return the answers to prompts; parameters and errors are those of Generation."""
    if request.use_beam_search:
        return BeamGeneration(state, kind, request, prompts, field_as_sent)
    if request.length_penalty != 1.0:
        sentence = f"got {request.length_penalty}, expected 1.0 without use_beam_search"
        raise invalid("length_penalty", sentence)
    return Generation(state, kind, request, prompts, field_as_sent)


class BeamGeneration(Generation):
    """Answers that are the best beams of their prompts."""

    def __init__(self, state: AppState, *args: Any) -> None:
        self._folder = state.config.model_folder
        super().__init__(state, *args)

    def _submit_all(self, _: str) -> list[AsyncStream]:
        """Check the request; the requests of a step are submitted while results are awaited."""
        request = self._request
        if request.stream:
            raise invalid("stream", f"got true, expected false {_WITH}")
        if request.n > MAX_WIDTH:
            raise invalid("n", f"got {request.n}, expected 1 to {MAX_WIDTH} {_WITH}")
        for fields in self._prompts:
            check_beam_fields(request, fields)
        return []

    async def replies(self) -> list[GenerateReply]:
        """Return `n` answers for each prompt, the best one first."""
        with fields_as_sent(self._field_as_sent):
            several = await gather(map(self._search, self._prompts))
        return [reply for replies in several for reply in replies]

    async def _search(self, fields: dict[str, Any]) -> list[GenerateReply]:
        prompt = await self._client.tokenize(**prompt_fields(fields))
        request = self._request
        params = BeamSearchParams(
            beam_width=request.n,
            max_tokens=_max_tokens(fields["max_tokens"], prompt),
            ignore_eos=request.ignore_eos,
            length_penalty=request.length_penalty,
            include_stop_str_in_output=request.include_stop_str_in_output,
        )
        search = BeamSearch(prompt.token_ids, params, _eos_token_ids(self._folder))
        first = None
        while requests := search.requests():
            steps = await gather(self._step(fields, one) for one in requests)
            try:
                search.step(steps)
            except ValueError as error:
                raise ApiError(503, str(error)) from error
            first = first or steps[0]
        assert first  # noqa: S101  max_tokens is 1 or more
        beams = search.best()
        skips = {"skip_special_tokens": request.skip_special_tokens}
        texts = await gather(self._client.detokenize(one.token_ids, **skips) for one in beams)
        pairs = zip(beams, texts, strict=True)
        return [_reply(first, beam, text, fields["logprobs"]) for beam, text in pairs]

    async def _step(self, fields: dict[str, Any], request: GenerateRequest) -> GenerateReply:
        request.client = caller.get().client
        request.cache_salt, request.priority = fields["cache_salt"], fields["priority"]
        return await AsyncStream(self._client, self._client.ask(request)).result()


def check_beam_fields(request: ApiRequest, fields: dict[str, Any]) -> None:
    """Raise ApiError for a field that has a meaning for sampled answers only.

    fields: those of `GenerateRequest`; the error names the client's.
    """
    if getattr(request, "echo", False) and request.logprobs is not None:
        raise invalid("echo", f"got true with logprobs, expected only one of them {_WITH}")
    for name in _REFUSED:
        if _is_neutral(name, fields.get(name)):
            continue
        if name == "structured_outputs" and isinstance(request, ChatRequest) and is_forced(request):
            raise invalid("tool_choice", f"got a forced call, expected auto or none {_WITH}")
        sent = name_as_sent(name, request).partition(".")[0]  # of a schema its `response_format`
        raise invalid(sent, f"got a value, expected none {_WITH}")


def _is_neutral(name: str, value: Any) -> bool:
    if name == "logit_bias":
        return not any((value or {}).values())
    return value in (None, getattr(_DEFAULTS, name), _NEUTRAL.get(name))


@cache
def _eos_token_ids(folder: Path) -> list[int]:
    return read_eos_token_ids(folder)


def _max_tokens(given: int | None, prompt: TokenizeReply) -> int:
    """Return the number of steps. Raises ApiError if the context has less room."""
    num_prompt_tokens = len(prompt.token_ids)
    room = prompt.max_model_len - num_prompt_tokens
    if room < 1 or (given or 0) > room:
        which = f"got {given} after a prompt of {num_prompt_tokens} tokens"
        raise invalid("max_tokens", f"{which}, expected at most {max(0, room)}")
    return given or room


def _reply(first: GenerateReply, beam: Beam, text: str, num_top: int | None) -> GenerateReply:
    """Return a beam as an answer. first: of its prompt's first step."""
    logprobs: list[TokenLogprobs | None] | None = None
    if num_top is not None:
        logprobs = [structs.replace(one, top=one.top[:num_top]) for one in beam.logprobs]
    return structs.replace(
        first,
        text=text,
        token_ids=beam.token_ids,
        finish_reason=beam.finish_reason,
        stop_reason=None,
        usage=structs.replace(first.usage, output_tokens=len(beam.token_ids)),
        logprobs=logprobs,
    )
