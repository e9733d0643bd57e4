"""Defaults of sampling, from the `generation_config.json` of a checkpoint."""

from pathlib import Path

from msgspec import Struct

from penstock.protocol.checkpoint import read_json
from penstock.protocol.messages import sampling as limits
from penstock.protocol.messages.sampling import SamplingParams


class GenerationConfig(Struct, kw_only=True, frozen=True):
    """The fields of `generation_config.json` that the pipeline uses."""

    eos_token_id: int | list[int] | None = None
    do_sample: bool | None = False
    temperature: limits.Temperature | None = None
    top_k: limits.TopK | None = None
    top_p: limits.TopP | None = None
    min_p: limits.Share | None = None
    repetition_penalty: limits.RepetitionPenalty | None = None

    def fill(self, sampling: SamplingParams) -> None:
        """Put the model's defaults where the request says nothing."""
        if sampling.temperature is None:
            own = 1.0 if self.temperature is None else self.temperature
            sampling.temperature = own if self.do_sample else 0.0
        for field, neutral in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
            if getattr(sampling, field) is None:
                default = getattr(self, field) if self.do_sample else None
                setattr(sampling, field, neutral if default is None else default)
        if sampling.repetition_penalty is None:
            sampling.repetition_penalty = self.repetition_penalty or 1.0


def read_generation_config(folder: Path) -> GenerationConfig:
    """All defaults where the file is missing."""
    path = folder / "generation_config.json"
    return read_json(path, GenerationConfig) if path.exists() else GenerationConfig()
