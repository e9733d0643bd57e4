"""A model for one program: `LLM` starts a pipeline of its own and asks it, as any client does.

    with LLM("Qwen3-8B", tensor_parallel_size=2) as llm:
        for output in llm.generate(["17+25=", "reverse: penstock"], SamplingParams(max_tokens=9)):
            print(output.prompt, output.outputs[0].text)

The pipeline ends with the block, with `close()`, or with the program.
"""

import contextlib
import itertools
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
from msgspec import Struct
from tqdm import tqdm

from penstock.launch.offline.beam_search import BeamSearchMethods
from penstock.launch.offline.bounded_concurrency import replies_to, submit_all
from penstock.launch.offline.outputs import RequestOutput, prompts_of, request_of
from penstock.launch.offline.pooling import PoolingMethods
from penstock.launch.pipeline.options import OTHER_NAMES
from penstock.launch.pipeline.target import LocalClient, target
from penstock.protocol.client.session import answer_requests, num_answers
from penstock.protocol.config import Config
from penstock.protocol.decoding import explain
from penstock.protocol.messages.chat import Conversation, chat_messages
from penstock.protocol.messages.client import (
    ChatMessage,
    GenerateReply,
    TokenizePromptRequest,
    TokenizeReply,
)
from penstock.protocol.messages.sampling import SamplingParams

OWN_DEFAULTS = {"log_level": "warning"}
Prompt = str | list[int] | dict[str, Any]
Messages = list[dict[str, Any]]


class LLM(PoolingMethods, BeamSearchMethods):
    """A model in a pipeline of its own; for one thread."""

    def __init__(
        self, model: str | Path = "", *, tensor_parallel_size: int = 1, **options: Any
    ) -> None:
        """Start the pipeline.

        `model` is the folder of a checkpoint or its name on the Hugging Face Hub; empty: the demo
        model. `options` are those of
        `launch all`, by their names there (`num_blocks`) or vLLM's (`enforce_eager`).

        Raises TypeError and ValueError for options that can't be, LaunchError if it does not start.
        """
        fields = _config_fields(options | {"model": str(model), "tp": tensor_parallel_size})
        with contextlib.ExitStack() as stack:
            self.config = stack.enter_context(target(fields, "llm", OWN_DEFAULTS))
            client = LocalClient(self.config.endpoint, self.config.name)
            self._client = stack.enter_context(client)
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
        `{"prompt_token_ids": [10, 11]}`). Parameters: one for all, or one for each.

        The results are in the order of the prompts. Raises RequestError for what is refused.
        Without a `seed` the noise follows from the number of the prompt in this `LLM`.
        """
        several: list[dict[str, Any]] = [{"prompt": one} for one in prompts_of(prompts)]
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
        """Generate as `generate` does, for conversations put through the model's chat template.

        Messages are those of OpenAI's API; the content is a text or a list of text parts.
        `chat_template_kwargs` are further arguments of the template: `{"enable_thinking": False}`.
        """
        several = [messages] if messages and isinstance(messages[0], dict) else messages
        prompts = [
            {
                "messages": _messages(one),
                "tools": tools,
                "chat_template_kwargs": chat_template_kwargs or {},
            }
            for one in several
        ]
        return self._run(prompts, sampling_params, use_tqdm)

    def _run(
        self,
        prompts: list[dict[str, Any]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        """`prompts`: fields of TokenizePromptRequest."""
        params = _one_for_each(params, len(prompts))
        places = [
            (one, index) for one, its in enumerate(params) for index in range(num_answers(its))
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
                one, index = places[place]
                outputs[one].add(index, reply, params[one].n)
                progress.count(reply)
        return outputs

    def _outputs(self, prompts: list[dict[str, Any]]) -> list[RequestOutput]:
        """Return a result without answers for each prompt, tokenized unless it is of ids."""
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
    """A bar of the answers, with the tokens a second of those that have ended."""

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


def _one_for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, number: int
) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * number
    if not isinstance(params, list | tuple) or not all(
        isinstance(one, SamplingParams) for one in params
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
    """Return the options by their names in Config. Raises TypeError and ValueError."""
    fields = {OTHER_NAMES.get(name, name): its for name, its in options.items()}
    if "enforce_eager" in fields:
        fields["enable_cuda_graphs"] = not fields.pop("enforce_eager")
    for name in fields:
        if name not in Config.__struct_fields__ or name in ("name", "endpoint", "curve_keys"):
            raise TypeError(f"LLM has no option {name!r}; `launch all --help` lists what it has")
    try:
        msgspec.convert(fields, Config)
    except msgspec.ValidationError as error:
        path, message = explain(str(error), fields, Config)
        if path == "tp":
            message = message.replace("tp", "tensor_parallel_size", 1)
        raise ValueError(message) from None
    return fields
