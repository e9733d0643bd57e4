"""Beam search of `LLM`, as in vLLM: requests for one token with its likeliest logprobs."""

from collections.abc import Sequence

from msgspec import Struct

from penstock.protocol.messages.client import (
    FinishReason,
    GenerateReply,
    GenerateRequest,
    Logprob,
    TokenLogprobs,
)

MAX_WIDTH = 10  # maximum beams; a request asks for twice as many logprobs, of which 20 are allowed
MAX_PENALTY = 10  # maximum exponent of a length; with a much greater exponent the power is infinite


class BeamSearchParams(Struct):
    """Parameters of a beam search."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0  # without effect: beams follow from the model's own logprobs
    length_penalty: float = 1.0  # exponent of the length that divides the sum of logprobs
    include_stop_str_in_output: bool = False  # True: keep the EOS at the end of a beam

    def __post_init__(self) -> None:
        if not 1 <= self.beam_width <= MAX_WIDTH:
            raise ValueError(f"beam_width: got {self.beam_width}, expected 1 to {MAX_WIDTH}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens: got {self.max_tokens}, expected 1 or more")
        if not abs(self.length_penalty) <= MAX_PENALTY:
            problem = f"got {self.length_penalty}, expected -{MAX_PENALTY} to {MAX_PENALTY}"
            raise ValueError(f"length_penalty: {problem}")


class Beam(Struct, kw_only=True):
    """Continuation of the prompt."""

    token_ids: list[int] = []  # tokens of the output
    logprobs: list[TokenLogprobs] = []  # one for each of `token_ids`
    cum_logprob: float = 0.0  # sum of the logprobs, including that of an EOS
    finish_reason: FinishReason = "length"
    stop_reason: int | None = None  # id of the EOS


class BeamSearch:
    """Beams of a prompt; the next step continues the `live` beams."""

    def __init__(
        self, prompt_token_ids: list[int], params: BeamSearchParams, eos_token_ids: Sequence[int]
    ) -> None:
        self.prompt_token_ids = prompt_token_ids
        self.live = [Beam()]
        self._ended: list[Beam] = []
        self._params = params
        self._eos_token_ids = () if params.ignore_eos else eos_token_ids
        self._num_steps = 0

    def requests(self) -> list[GenerateRequest]:
        """Return a request for the next token of each live beam; none after the search's end."""
        if self._num_steps == self._params.max_tokens:
            return []
        return [
            GenerateRequest(
                prompt=[*self.prompt_token_ids, *beam.token_ids],
                max_tokens=1,
                temperature=0.0,
                repetition_penalty=1.0,
                logprobs=2 * self._params.beam_width,
                speculative=False,
                num_answers=0,
            )
            for beam in self.live
        ]

    def step(self, replies: Sequence[GenerateReply]) -> None:
        """Replace the live beams by the best of their continuations. Raises ValueError.

        replies: in the order of the requests from `requests`.
        """
        self._num_steps += 1
        continued: list[Beam] = []
        for beam, reply in zip(self.live, replies, strict=True):
            position = reply.logprobs[0] if reply.logprobs else None
            if position is None:
                raise ValueError(f"got no logprobs, the request ended: {reply.finish_reason}")
            for token in position.top:
                after = self._after(beam, token, position.top)
                (self._ended if after.finish_reason == "stop" else continued).append(after)
        self.live = self._best(continued)

    def best(self) -> list[Beam]:
        """Return the best beams in descending order."""
        return self._best([*self._ended, *self.live])

    def _after(self, beam: Beam, token: Logprob, top: list[Logprob]) -> Beam:
        after = Beam(
            token_ids=beam.token_ids,
            logprobs=beam.logprobs,
            cum_logprob=beam.cum_logprob + token.logprob,
        )
        is_eos = token.token_id in self._eos_token_ids
        if is_eos:
            after.finish_reason, after.stop_reason = "stop", token.token_id
        if not is_eos or self._params.include_stop_str_in_output:
            after.token_ids = [*beam.token_ids, token.token_id]
            chosen = {name: getattr(token, name) for name in Logprob.__struct_fields__}
            after.logprobs = [*beam.logprobs, TokenLogprobs(**chosen, top=top)]
        return after

    def _best(self, beams: list[Beam]) -> list[Beam]:
        return sorted(beams, key=self._score, reverse=True)[: self._params.beam_width]

    def _score(self, beam: Beam) -> float:
        """Return the sum of logprobs, normalized by the length with the prompt, without an EOS."""
        has_eos = beam.finish_reason == "stop" and self._params.include_stop_str_in_output
        length = len(self.prompt_token_ids) + len(beam.token_ids) - has_eos
        return float(beam.cum_logprob / max(1, length) ** self._params.length_penalty)
