"""The requests of a load by kind, covering every way in which an answer is made or sent.

The demo model counts and repeats; other models continue with random tokens. A lost or doubled token
therefore changes all later tokens.
"""

from collections.abc import Callable, Iterable
from random import Random
from typing import Any

from msgspec import Struct

from penstock.launch.bench.options import random_lengths, variant
from penstock.launch.chaos.processes import ChaosOptions
from penstock.protocol.messages.client import ChatMessage, GenerateRequest
from penstock.protocol.messages.sampling import Pooling
from penstock.protocol.messages.structured import StructuredOutputs

SHORT, LONG = 30, 250
END_OF_THOUGHT = "</think>"
# bias of END_OF_THOUGHT: a model with random weights would think up to `max_tokens`
EARLY_END = 6.0
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "unit": {"enum": ["m³/s", "MW", "m"]},
        "turbine": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 4},
    },
    "required": ["name", "unit", "turbine", "tags"],
    "additionalProperties": False,
}
GRAMMARS: list[dict[str, Any]] = [
    {"json": SCHEMA},
    {"regex": "[0-9a-f]{40,90}"},
    {"choice": ["the upper gate", "the lower gate", "the turbine is open"]},
    {"grammar": 'start: line line line\nline: /[a-z]{3,30}/ ": " /[0-9]{1,9}/ "\\n"'},
]


class Model(Struct, frozen=True):
    """Properties of a served model on which requests depend."""

    name: str
    vocab_size: int
    is_demo: bool = False
    is_embedding: bool = False
    end_of_thought: int | None = None  # token id; None: no reasoning


class HttpCall(Struct, frozen=True):
    """A request to an HTTP API."""

    path: str
    body: dict[str, Any]

    @property
    def stream(self) -> bool:
        return bool(self.body["stream"])


class Call(Struct, frozen=True):
    """Request of the load."""

    kind: str
    request: GenerateRequest | HttpCall


class Draw:
    """Random fields of a request to one model."""

    def __init__(self, model: Model, number: int, seed: int) -> None:
        self.model = model
        self.number = number
        self.random = Random(f"request {number} {seed}")  # noqa: S311  repeatable, not secret
        length = random_lengths(number + 1, SHORT, LONG, seed)[-1:]
        self.prompt: list[int] = variant(length, 0, model.vocab_size)[0].prompt
        self.max_tokens = self.random.randint(SHORT, LONG)

    @property
    def text(self) -> str:
        """A prompt for the demo model, or arbitrary words for another model."""
        draw = self.random
        if self.number % 8 < 6:
            first = draw.randint(0, 900)
            return f"count from {first} to {first + draw.randint(10, 80)}"
        numbers = (f"{draw.randrange(10**6)} ✓ né" for _ in range(draw.randint(2, 8)))
        return "repeat: " + " ".join(numbers)

    @property
    def seed(self) -> int:
        return self.random.randrange(2**31)

    @property
    def sampled(self) -> dict[str, Any]:
        """Fields of a sampled request whose answer always has the same tokens."""
        return {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0, "seed": self.seed}

    def request(self, **fields: Any) -> GenerateRequest:
        """Return a request over ZeroMQ; every other request streams."""
        own = {"max_tokens": self.max_tokens, "stream": self.number % 2 == 0}
        return GenerateRequest(model=self.model.name or None, **own | fields)

    def http(self, path: str, **fields: Any) -> HttpCall:
        """Return a request over HTTP; every other request streams."""
        own = {"model": self.model.name, "stream": self.number % 2 == 0}
        return HttpCall(path, own | fields)

    def chat(self, **fields: Any) -> HttpCall:
        messages = [{"role": "user", "content": self.text}]
        sampled = self.sampled | {"max_tokens": self.max_tokens}
        return self.http("/v1/chat/completions", messages=messages, **sampled | fields)


def _plain(draw: Draw) -> GenerateRequest:
    """Return a greedy request, or every other time a request with temperature 1 and a seed."""
    demo, seed = draw.model.is_demo, draw.seed if draw.number % 4 >= 2 else None
    sampled = draw.sampled | {"seed": seed, "temperature": 0.0 if seed is None else 1.0}
    return draw.request(
        prompt=draw.text if demo else draw.prompt,
        max_tokens=LONG * 2 if demo and seed is None else draw.max_tokens,
        ignore_eos=not demo or seed is not None,
        **sampled,
    )


def _grammar(draw: Draw) -> GenerateRequest:
    grammar = draw.random.choice(GRAMMARS)
    return draw.request(
        prompt=draw.text, structured_outputs=StructuredOutputs(**grammar), **draw.sampled
    )


def _reasoning(draw: Draw) -> GenerateRequest:
    """Return a request with a grammar for the text after the reasoning."""
    assert draw.model.end_of_thought is not None  # noqa: S101  `kinds_of` has looked
    return draw.request(
        messages=[ChatMessage(role="user", content=draw.text)],
        structured_outputs=StructuredOutputs(**draw.random.choice(GRAMMARS)),
        logit_bias={draw.model.end_of_thought: EARLY_END},
        **draw.sampled | {"max_tokens": 2 * LONG},
    )


def _logprobs(draw: Draw) -> GenerateRequest:
    return draw.request(prompt=draw.text, logprobs=3, prompt_logprobs=2, **draw.sampled)


def _stop(draw: Draw) -> GenerateRequest:
    return draw.request(
        prompt=draw.text,
        stop=[draw.random.choice(["5 1", "né 2", "9", "e"]), str(draw.random.randint(100, 999))],
        include_stop_str_in_output=draw.number % 4 == 0,
        min_tokens=draw.random.randint(0, 20),
        ignore_eos=True,
        **draw.sampled,
    )


def _penalties(draw: Draw) -> GenerateRequest:
    return draw.request(
        prompt=draw.text,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        logit_bias=dict.fromkeys(draw.prompt[:8], 3.0),
        bad_words=["7", "né"],
        ignore_eos=True,
        **draw.sampled | {"top_k": 40, "top_p": 0.9, "min_p": 0.02},
    )


def _chat(draw: Draw) -> HttpCall:
    return draw.chat(logprobs=True, top_logprobs=2)


def _several(draw: Draw) -> HttpCall:
    return draw.chat(n=draw.random.randint(2, 4))


def _tools(draw: Draw) -> HttpCall:
    function = {"name": "set_gate", "description": "Moves a gate.", "parameters": SCHEMA}
    tools = [{"type": "function", "function": function}]
    return draw.chat(tools=tools, tool_choice="required", max_tokens=2 * LONG)


def _messages(draw: Draw) -> HttpCall:
    return draw.http(
        "/v1/messages",
        messages=[{"role": "user", "content": draw.text}],
        max_tokens=LONG * 2,
        temperature=0.0,
    )


def _responses(draw: Draw) -> HttpCall:
    limits = {"max_output_tokens": LONG * 2, "store": False}
    return draw.http("/v1/responses", input=draw.text, temperature=0.0, **limits)


def _embeddings(draw: Draw) -> GenerateRequest:
    return draw.request(prompt=draw.prompt, pooling=Pooling(), stream=False, max_tokens=None)


MIX: dict[str, Callable[[Draw], GenerateRequest | HttpCall]] = {
    "plain": _plain,
    "grammar": _grammar,
    "reasoning": _reasoning,
    "logprobs": _logprobs,
    "stop": _stop,
    "penalties": _penalties,
    "chat": _chat,
    "n": _several,
    "tools": _tools,
    "messages": _messages,
    "responses": _responses,
    "embeddings": _embeddings,
}
HTTP_KINDS = {"chat", "n", "tools", "messages", "responses"}


def make_calls(options: ChaosOptions, models: Iterable[Model], kinds: Iterable[str]) -> list[Call]:
    """Return `options.distinct` different requests, cycling through kinds, for each model."""
    pairs = [(model, kind) for model in models for kind in kinds if _has(model, kind)]
    numbers = range(options.distinct)
    chosen = [(*pairs[number % len(pairs)], number // len(pairs)) for number in numbers]
    return [
        Call(kind, MIX[kind](Draw(model, number, options.seed))) for model, kind, number in chosen
    ]


def _has(model: Model, kind: str) -> bool:
    """Return whether a model supports a kind of request."""
    if model.is_embedding or kind == "embeddings":
        return model.is_embedding and kind == "embeddings"
    return kind != "reasoning" or model.end_of_thought is not None
