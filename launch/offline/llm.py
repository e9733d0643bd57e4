"""A model for one program: `LLM` starts a private pipeline and sends requests like any client.

    with LLM("Qwen3-8B", tensor_parallel_size=2) as llm:
        for output in llm.generate(["17+25=", "reverse: penstock"], SamplingParams(max_tokens=9)):
            print(output.prompt, output.outputs[0].text)

The pipeline ends with the block, with `close()`, or with the program.
"""

import contextlib
import itertools
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec
from msgspec import Struct
from tqdm import tqdm

from penstock.launch.offline.beam_search import Beam, BeamSearch, BeamSearchParams
from penstock.launch.offline.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    by_token,
    prompts_of,
    request_of,
)
from penstock.launch.pipeline.options import OTHER_NAMES
from penstock.launch.pipeline.target import LocalClient, target
from penstock.protocol.checkpoint import read_model_config
from penstock.protocol.client.client import Client
from penstock.protocol.client.scoring import LABELS, Scoring, label_id, result_of
from penstock.protocol.client.session import (
    Done,
    Final,
    PendingRequest,
    answer_requests,
    num_answers,
)
from penstock.protocol.config import OPTIONS, Config
from penstock.protocol.decoding import explain
from penstock.protocol.messages.chat import Conversation, chat_messages
from penstock.protocol.messages.client import (
    AbortRequest,
    ChatMessage,
    DetokenizeReply,
    DetokenizeRequest,
    ErrorReply,
    GenerateReply,
    GenerateRequest,
    Request,
    TokenizePromptRequest,
    TokenizeReply,
)
from penstock.protocol.messages.sampling import Pooling, SamplingParams
from penstock.protocol.tokenizer_file import read_eos_token_ids

OWN_DEFAULTS = {"log_level": "warning"}
Kind = TypeVar("Kind", bound=Done)
Prompt = str | list[int] | dict[str, Any]
Messages = list[dict[str, Any]]


class LLM:
    """Model in a private pipeline; an instance belongs to one thread."""

    def __init__(
        self, model: str | Path = "", *, tensor_parallel_size: int = 1, **options: Any
    ) -> None:
        """Start the pipeline.

        model: folder of a checkpoint, or a name on the Hugging Face Hub; empty: the demo model;
        demo-hybrid: the hybrid demo model.
        options: options of `launch all`, with their names there (`num_blocks`) or vLLM's names
        (`enforce_eager`).

        Raises TypeError and ValueError for invalid options, LaunchError if the pipeline does not
        start.
        """
        fields = _config_fields(options | {"model": str(model), "tp": tensor_parallel_size})
        with contextlib.ExitStack() as stack:
            self.config = stack.enter_context(target(fields, "llm", OWN_DEFAULTS))
            self._client = stack.enter_context(LocalClient(self.config.endpoint, self.config.name))
            self._end = weakref.finalize(self, stack.pop_all().close)
        self._numbers = itertools.count()
        num_running = self.config.max_running
        self._window = num_running + min(num_running, self.config.max_waiting_requests)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._end()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue prompts.

        A prompt is a text, token ids, or a map as in vLLM (`{"prompt": "17+25="}`,
        `{"prompt_token_ids": [10, 11]}`). sampling_params: for all prompts, or a sequence with
        parameters for each prompt.

        The results are in the order of the prompts. Raises RequestError for a refused request.
        Without a `seed`, the noise follows from the number of the prompt in this `LLM`.
        """
        several: list[dict[str, Any]] = [{"prompt": prompt} for prompt in prompts_of(prompts)]
        return self._run(several, sampling_params, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> list[RequestOutput]:
        """Generate answers to conversations, which are rendered with the model's chat template.

        Messages have the form of OpenAI's API; the content is a text or a list of text parts.
        `chat_template_kwargs` are further arguments of the template: `{"enable_thinking": False}`.
        For other arguments, see `generate`.
        """
        several = [messages] if messages and isinstance(messages[0], dict) else messages
        prompts = [
            {
                "messages": _messages(conversation),
                "tools": tools,
                "chat_template_kwargs": chat_template_kwargs or {},
            }
            for conversation in several
        ]
        return self._run(prompts, sampling_params, use_tqdm)

    def embed(
        self,
        prompts: Any,
        *,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of each prompt; prompts are as in `generate`.

        dimensions: numbers to keep. truncate_prompt_tokens: tokens to keep from the start of a
        longer prompt. Raises RequestError for a refused request.
        """
        fields = {"pooling": Pooling(dimensions=dimensions), "truncation_side": "right"}
        fields["truncate_prompt_tokens"] = truncate_prompt_tokens
        requests = [{"prompt": prompt, **fields} for prompt in prompts_of(prompts)]
        return [
            EmbeddingRequestOutput(
                request_id=reply.request_id,
                outputs=EmbeddingOutput(embedding=result_of(reply)),
                num_prompt_tokens=reply.usage.prompt_tokens,
                num_cached_tokens=reply.usage.cached_tokens,
            )
            for reply in self._pool(requests, len(requests), "embeddings", use_tqdm)
        ]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        instruction: str | None = None,
        use_tqdm: bool = True,
    ) -> list[ScoringRequestOutput]:
        """Return the score of each pair of texts; a single first text is used for all pairs.

        instruction: the task, for the model's prompt. Raises ValueError, RequestError.
        """
        first = [data_1] if isinstance(data_1, str) else list(data_1)
        second = [data_2] if isinstance(data_2, str) else list(data_2)
        if len(first) not in (1, len(second)):
            raise ValueError(f"data_1: got {len(first)} texts, expected 1 or {len(second)}")
        pairs = list(zip(itertools.cycle(first), second, strict=False))
        scoring = Scoring(pairs, self._labels(), instruction)
        number = len(scoring.parts)
        scores = scoring.scores(self._pool(scoring.requests, number, "scores", use_tqdm))
        return [
            ScoringRequestOutput(
                request_id=str(next(self._numbers)), outputs=ScoringOutput(score=score)
            )
            for score in scores
        ]

    def beam_search(self, prompts: Any, params: BeamSearchParams) -> list[BeamSearchOutput]:
        """Return the best continuations of each prompt; prompts are as in `generate`.

        Each step requests one token for each beam of all prompts, whose KV is in the prefix cache.
        Raises RequestError for a refused request, ValueError if the pipeline aborts a request.
        """
        outputs = self._outputs([{"prompt": prompt} for prompt in prompts_of(prompts)])
        eos = read_eos_token_ids(self.config.model_folder)
        searches = [BeamSearch(output.prompt_token_ids, params, eos) for output in outputs]
        while steps := [
            (search, requests) for search in searches if (requests := search.requests())
        ]:
            asked = itertools.chain.from_iterable(requests for _, requests in steps)
            replies = iter(replies_to(self._client, asked, self._window, GenerateReply))
            for search, requests in steps:
                search.step([next(replies) for _ in requests])
        best = [(search, search.best()) for search in searches]
        tokens = [
            [*search.prompt_token_ids, *beam.token_ids] for search, beams in best for beam in beams
        ]
        questions = [DetokenizeRequest(token_ids=token_ids) for token_ids in tokens]
        texts = replies_to(self._client, questions, self._window, DetokenizeReply)
        sequences = map(_sequence, (beam for _, beams in best for beam in beams), tokens, texts)
        return [
            BeamSearchOutput(sequences=list(itertools.islice(sequences, len(beams))))
            for _, beams in best
        ]

    def _labels(self) -> list[int] | None:
        if read_model_config(self.config.model_folder).is_embedding_model:
            return None
        ask = self._client.tokenize
        return [label_id(label, ask(label, add_special_tokens=False).token_ids) for label in LABELS]

    def _pool(
        self, requests: Iterable[dict[str, Any]], number: int, name: str, shows: bool
    ) -> list[GenerateReply]:
        """Return the replies in the order of the requests, which are read only as they are sent."""
        questions = (
            GenerateRequest(request_id=str(next(self._numbers)), **fields) for fields in requests
        )
        with tqdm(total=number, desc=name, dynamic_ncols=True, disable=not shows) as bar:
            return replies_to(self._client, questions, self._window, GenerateReply, bar.update)

    def _run(
        self,
        prompts: list[dict[str, Any]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        """Return the outputs of prompts, which are fields of TokenizePromptRequest."""
        params = _one_for_each(params, len(prompts))
        places = [
            (number, index)
            for number, its in enumerate(params)
            for index in range(num_answers(its))
        ]
        outputs = self._outputs(prompts)
        requests = itertools.chain.from_iterable(
            answer_requests(request_of(*pair)) for pair in zip(outputs, params, strict=True)
        )
        with (
            _Progress(len(places), use_tqdm) as progress,
            contextlib.closing(submit_all(self._client, requests, self._window)) as replies,
        ):
            for place, reply in replies:
                assert isinstance(reply, GenerateReply)  # noqa: S101  for mypy
                number, index = places[place]
                outputs[number].add(index, reply, params[number].n)
                progress.count(reply)
        return outputs

    def _outputs(self, prompts: list[dict[str, Any]]) -> list[RequestOutput]:
        """Return a result without answers for each prompt; texts are tokenized."""
        outputs, texts = [], []
        for fields in prompts:
            prompt = fields.get("prompt")
            token_ids = prompt if isinstance(prompt, list) else []
            text = prompt if isinstance(prompt, str) else None
            outputs.append(
                RequestOutput(
                    request_id=str(next(self._numbers)), prompt=text, prompt_token_ids=token_ids
                )
            )
            if not isinstance(prompt, list):
                texts.append((outputs[-1], TokenizePromptRequest(**fields)))
        questions = [question for _, question in texts]
        replies = replies_to(self._client, questions, self._window, TokenizeReply)
        for (output, _), reply in zip(texts, replies, strict=True):
            output.prompt_token_ids = reply.token_ids
        return outputs


class _Chat(Struct):
    messages: Conversation


class _Progress:
    """Progress bar of the answers, with the tokens per second of ended answers."""

    def __init__(self, total: int, is_shown: bool) -> None:
        self._bar = tqdm(total=total, desc="answers", dynamic_ncols=True, disable=not is_shown)
        self._start = time.perf_counter()
        self._num_inputs = self._num_outputs = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def count(self, reply: GenerateReply) -> None:
        self._num_inputs += reply.usage.prompt_tokens
        self._num_outputs += reply.usage.output_tokens
        seconds = time.perf_counter() - self._start
        prefill, decode = self._num_inputs / seconds, self._num_outputs / seconds
        text = f"prefill {prefill:,.0f} tok/s, decode {decode:,.0f} tok/s"
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update()


def _sequence(beam: Beam, token_ids: list[int], reply: DetokenizeReply) -> BeamSearchSequence:
    return BeamSearchSequence(
        tokens=token_ids,
        logprobs=by_token(list(beam.logprobs)) or [],
        cum_logprob=beam.cum_logprob,
        text=reply.text,
        finish_reason=beam.finish_reason,
        stop_reason=beam.stop_reason,
    )


def _one_for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, number: int
) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * number
    if not isinstance(params, list | tuple) or not all(
        isinstance(sampling, SamplingParams) for sampling in params
    ):
        kind = type(params).__name__
        raise TypeError(f"sampling_params: got {kind}, expected SamplingParams or a list of them")
    if len(params) != number:
        sentence = f"expected one, or one for each of {number} prompts"
        raise ValueError(f"sampling_params: got {len(params)}, {sentence}")
    return params


def _messages(conversation: Any) -> list[ChatMessage]:
    raw = {"messages": conversation}
    try:
        return chat_messages(msgspec.convert(raw, _Chat).messages)
    except msgspec.ValidationError as error:
        raise ValueError(explain(str(error), raw, _Chat)[1]) from None


def _config_fields(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with their names in Config. Raises TypeError and ValueError."""
    fields = {OTHER_NAMES.get(name, name): its for name, its in options.items()}
    if "enforce_eager" in fields:
        fields["enable_cuda_graphs"] = not fields.pop("enforce_eager")
    for name in fields:
        if name not in OPTIONS or name in ("name", "endpoint", "curve_keys"):
            raise TypeError(f"LLM has no option {name!r}; `launch all --help` lists what it has")
    try:
        msgspec.convert(fields, Config)
    except msgspec.ValidationError as error:
        path, message = explain(str(error), fields, Config)
        if path == "tp":
            message = message.replace("tp", "tensor_parallel_size", 1)
        raise ValueError(message) from None
    return fields


def replies_to(
    client: Client,
    requests: Iterable[Request],
    size: int,
    kind: type[Kind],
    on_reply: Callable[[], Any] = lambda: None,
) -> list[Kind]:
    """Return the replies in the order of their requests, which are sent by `submit_all`.

    on_reply: called after each reply. Raises RequestError.
    """
    found: dict[int, Kind] = {}
    with contextlib.closing(submit_all(client, requests, size)) as replies:
        for place, reply in replies:
            assert isinstance(reply, kind)  # noqa: S101  for mypy
            found[place] = reply
            on_reply()
    return [found[place] for place in range(len(found))]


def submit_all(
    client: Client, requests: Iterable[Request], size: int
) -> Generator[tuple[int, Done], None, None]:
    """Yield each reply as it arrives, with its request's index; up to `size` requests are open.

    If the pipeline is still `overloaded`, nothing is sent until another reply arrives. If no
    request is open, nothing is sent for the time that the pipeline asked for. If the generator is
    closed early, open requests are aborted. Raises RequestError.
    """
    waiting = enumerate(requests)
    refused: deque[tuple[int, Request]] = deque()
    open_answers: dict[int, PendingRequest] = {}
    ended: deque[int] = deque()

    def note_end(place: int) -> None:
        if open_answers[place].final:
            ended.append(place)

    def send(num_free: int) -> None:
        while num_free and (pair := refused.popleft() if refused else next(waiting, None)):
            place, request = pair
            answer = open_answers[place] = client.ask(request)
            answer.on_change = partial(note_end, place)
            note_end(place)  # replies that arrived while the request was sent
            num_free -= 1

    try:
        send(size)
        while open_answers:
            while not ended:
                client.wait()
            place = ended.popleft()
            answer = open_answers.pop(place)
            if (seconds := _retry_after(answer.final)) is None:
                yield place, answer.result()
                send(size - len(open_answers))
                continue
            refused.append((place, answer.question))
            if not open_answers:
                client.take_until(time.perf_counter() + seconds)
                send(size)
    finally:
        _abort(client, open_answers.values())


def _retry_after(final: Final | None) -> float | None:
    """Return the seconds after which to send again; None if the pipeline was not overloaded."""
    is_overloaded = isinstance(final, ErrorReply) and final.code == "overloaded"
    return getattr(final, "retry_after", None) or 1.0 if is_overloaded else None


def _abort(client: Client, answers: Iterable[PendingRequest]) -> None:
    for answer in answers:
        if answer.request_id:
            client.ask(AbortRequest(request_id=answer.request_id))
