"""Beam search of `LLM`, shaped as in vLLM."""

from typing import Any

from msgspec import Struct

from penstock.launch.offline.bounded_concurrency import replies_to
from penstock.launch.offline.outputs import ByToken, RequestOutput, by_token, prompts_of
from penstock.protocol.client.beam_search import Beam, BeamSearch, BeamSearchParams
from penstock.protocol.client.client import Client
from penstock.protocol.config import Config
from penstock.protocol.messages.client import (
    DetokenizeReply,
    DetokenizeRequest,
    FinishReason,
    GenerateReply,
)
from penstock.protocol.tokenizer_file import read_eos_token_ids


class BeamSearchSequence(Struct, kw_only=True):
    """One of the best continuations of a prompt."""

    tokens: list[int]
    """of the prompt and of the output"""
    logprobs: list[ByToken | None]
    """of the output's tokens"""
    cum_logprob: float
    text: str
    """of `tokens`"""
    finish_reason: FinishReason
    stop_reason: int | None


class BeamSearchOutput(Struct, kw_only=True):
    """The best continuations of one prompt, the best one first."""

    sequences: list[BeamSearchSequence]


class BeamSearchMethods:
    """The method of `LLM` that searches."""

    config: Config
    _client: Client
    _window: int

    def beam_search(self, prompts: Any, params: BeamSearchParams) -> list[BeamSearchOutput]:
        """Return the best continuations of each prompt, which are those of `generate`.

        Each step requests one token for each beam of all prompts, whose KV is in the prefix cache.
        Raises RequestError for what is refused, ValueError if the pipeline aborts a request.
        """
        several = [{"prompt": one} for one in prompts_of(prompts)]
        eos = read_eos_token_ids(self.config.model_folder)
        searches = [BeamSearch(one.prompt_token_ids, params, eos) for one in self._outputs(several)]
        while places := [(one, request) for one in searches for request in one.requests()]:
            requests = [request for _, request in places]
            replies = iter(replies_to(self._client, requests, self._window, GenerateReply))
            for search in dict.fromkeys(one for one, _ in places):
                search.step([next(replies) for _ in search.live])
        found = [(search, beam) for search in searches for beam in search.best()]
        tokens = [[*search.prompt_token_ids, *beam.token_ids] for search, beam in found]
        questions = [DetokenizeRequest(token_ids=one) for one in tokens]
        texts = replies_to(self._client, questions, self._window, DetokenizeReply)
        outputs = {search: BeamSearchOutput(sequences=[]) for search in searches}
        for (search, beam), token_ids, reply in zip(found, tokens, texts, strict=True):
            outputs[search].sequences.append(_sequence(beam, token_ids, reply.text))
        return list(outputs.values())

    def _outputs(self, prompts: list[dict[str, Any]]) -> list[RequestOutput]:
        raise NotImplementedError


def _sequence(beam: Beam, token_ids: list[int], text: str) -> BeamSearchSequence:
    return BeamSearchSequence(
        tokens=token_ids,
        logprobs=by_token(list(beam.logprobs)) or [],
        cum_logprob=beam.cum_logprob,
        text=text,
        finish_reason=beam.finish_reason,
        stop_reason=beam.stop_reason,
    )
