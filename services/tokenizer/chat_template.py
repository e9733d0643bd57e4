"""Chat templates, which render a conversation in the text format of the model's training.

Chat templates are Jinja templates of a checkpoint, written for the environment of transformers
(`apply_chat_template`). This module has an equal environment, without transformers and torch.
"""

import functools
import json
import logging
import signal
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.protocol.checkpoint import ModelError
from penstock.protocol.messages.client import ChatMessage, ErrorReply, PromptFields
from penstock.protocol.tokenizer_file import choose_template, read_chat_templates
from penstock.services.tokenizer.child import added_memory, end_child, start_child

log = logging.getLogger("tokenizer")
DEFECT = "a defect of the server: the request can't be tokenized; its log says more"


class PromptError(ValueError):
    """An error in a field of a prompt, with `too_long` as in `ErrorReply`."""

    def __init__(self, field: str, message: str, too_long: tuple[int, int] | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.too_long = too_long


def error_reply(error: Exception) -> ErrorReply:
    """Return the reply for an exception in an `except` block. Log defects."""
    if isinstance(error, PromptError):
        return ErrorReply(
            code="invalid", message=str(error), field=error.field, too_long=error.too_long
        )
    log.exception("a request can't be tokenized")
    return ErrorReply(code="failed", message=DEFECT)


log = logging.getLogger("tokenizer")
# arguments of `apply_chat_template` that are not allowed in `chat_template_kwargs`
NOT_FOR_CLIENTS = frozenset(
    {"messages", "tools", "chat_template", "tokenize", "add_generation_prompt"}
    | {"continue_final_message", "conversation", "return_dict", "return_tensors"}
)
# Limit on CPU time. A usual template takes milliseconds; other requests wait meanwhile.
MAX_RENDER_SECONDS = 5.0
MAX_RENDER_BYTES = 1 << 28  # limit on added memory, for a client's template
MAX_OWN_BYTES = 1 << 30  # limit on added memory, for the checkpoint's template
LIMITS = f"takes more than {MAX_RENDER_SECONDS:g} s or {MAX_RENDER_BYTES >> 20} MiB to render"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
# variable in templates of models that generate `<think>`, unless the prompt has empty reasoning
REASONING_SWITCH = "enable_thinking"
# A marker after a final message that is continued: the text before the marker is the prompt.
_END_OF_FINAL_MESSAGE = "\ue000end of the final message\ue001"

# errors of reading a checkpoint's template and special tokens
_UNREADABLE = (
    *(OSError, msgspec.MsgspecError, TemplateError),
    *(TypeError, LookupError, RecursionError, ValueError),
)
# first words of a refusal by the checkpoint's template, and by the request's template
_OWN_REFUSAL = (
    "messages: the chat template refused them: ",
    "chat_template: got one that refuses the messages: ",
)


class TimeLimitError(BaseException):
    """The end of the CPU time. No `Exception`, which the interrupted code may catch."""


def _end(*_: object) -> NoReturn:
    raise TimeLimitError


class ChatTemplate:
    """The chat templates of a checkpoint. A checkpoint without templates serves prompts only."""

    def __init__(self, folder: Path) -> None:
        """Read the templates. Must run in the main thread, which gets the time limit's signal."""
        signal.signal(signal.SIGVTALRM, _end)
        try:
            config = _tokenizer_config(folder / "tokenizer_config.json")
            sources = read_chat_templates(folder)
            self._templates: dict[str, Template] = {}
            for name, source in sources.items():
                self._templates[name] = template = _environment().from_string(source)
                # each rendering copies the globals: a dict is copied faster than Jinja's ChainMap
                template.globals = dict(template.globals)
            # True if the model generates `<think>` itself
            self.opens_reasoning = any(REASONING_SWITCH in source for source in sources.values())
            self._special_tokens = {
                name: token["content"] if isinstance(token, dict) else token
                for name in SPECIAL_TOKENS
                if (token := config.get(name))
            }
        except _UNREADABLE as error:
            raise ModelError(f"the chat template of {folder} can't be read: {error}") from error

    def render(self, request: PromptFields) -> str:
        """Render `messages` up to the start of the assistant's answer. Raises PromptError."""
        own = choose_template(self._templates, has_tools=request.tools is not None)
        if own is None and request.chat_template is None:
            names = f" but {', '.join(sorted(self._templates))}" * bool(self._templates)
            raise PromptError("messages", f"the model has no chat template{names}; give a prompt")
        continues, kwargs = request.continue_final_message, request.chat_template_kwargs
        if taken := sorted(NOT_FOR_CLIENTS & kwargs.keys()):
            text = f"chat_template_kwargs: got {taken[0]}, which it can't set; leave it out"
            raise PromptError("chat_template_kwargs", text)
        adds_prompt = request.add_generation_prompt
        messages = [_as_map(message) for message in request.messages or []]
        if continues and messages:
            messages[-1]["content"] += _END_OF_FINAL_MESSAGE
        variables = {
            **self._special_tokens,
            **kwargs,
            "messages": messages,
            "tools": request.tools,
            "documents": kwargs.get("documents"),
            "add_generation_prompt": not continues if adds_prompt is None else adds_prompt,
        }
        if own is not None and request.chat_template is None:
            text = _render_own(own, variables)
        else:
            text = _render_in_child(request.chat_template or "", variables)
        return _cut(text) if continues else text


def _render_in_child(source: str, variables: dict[str, Any]) -> str:
    """Render a client's template in a child process. Raises PromptError."""

    def work() -> bytes:
        try:
            return msgspec.json.encode([_render(_compile(source), variables)])
        except PromptError as error:
            message = str(error).encode(errors="backslashreplace").decode()
            if error.field == "messages":
                message = message.replace(*_OWN_REFUSAL, 1)
            return msgspec.json.encode([None, "chat_template", message])

    exit_code, result = end_child(*start_child(work, MAX_RENDER_SECONDS, 0, MAX_RENDER_BYTES))
    if exit_code:
        _log_limits()
        message = f"chat_template: got one that {LIMITS}; simplify it"
        raise PromptError("chat_template", message)
    text, *error = msgspec.json.decode(result)
    if error:
        raise PromptError(*error)
    return str(text)


def _render_own(template: Template, variables: dict[str, Any]) -> str:
    """Render the checkpoint's template. Raises PromptError."""
    try:
        with added_memory(MAX_OWN_BYTES):
            return _render(template, variables)
    except MemoryError:
        raise PromptError(
            "messages",
            f"messages: the chat template took more than {MAX_OWN_BYTES >> 20} MiB to render them, "
            "which is the limit; send fewer or shorter ones",
        ) from None


@functools.cache
def _log_limits() -> None:
    log.warning("refused a client's chat template (further ones are not logged): it %s", LIMITS)


def _render(template: Template, variables: dict[str, Any]) -> str:
    """Render a template. Raises PromptError, also after MAX_RENDER_SECONDS of CPU time.

    The time limit can't interrupt a call into C. The supervisor kills a process that hangs in C
    after --step-timeout.
    """
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, MAX_RENDER_SECONDS)
        try:
            text = str(template.render(variables))
            text.encode()  # raises if the text has lone surrogates
            return text
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except TimeLimitError:
        raise PromptError(
            "messages",
            f"messages: the chat template took more than {MAX_RENDER_SECONDS:g} s to render them, "
            "which is the limit; send fewer or shorter ones",
        ) from None
    except _REFUSALS as error:
        raise PromptError("messages", f"{_OWN_REFUSAL[0]}{error}") from error


def _cut(text: str) -> str:
    before, end, _ = text.rpartition(_END_OF_FINAL_MESSAGE)
    if not end:
        raise PromptError(
            "continue_final_message",
            "continue_final_message: got true, but the chat template leaves out the final message",
        )
    return before


def _compile(source: str) -> Template:
    try:
        return _environment().from_string(source)
    except (TemplateError, RecursionError, ValueError) as error:
        message = f"chat_template: got one that is not a Jinja template: {error}"
        raise PromptError("chat_template", message) from error


# errors that a template raises, itself or for data of a wrong type
_REFUSALS = (
    *(TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError),
    *(TypeError, ValueError),
)


def _tokenizer_config(path: Path) -> dict[str, Any]:
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Any]) if path.exists() else {}


def _as_map(message: ChatMessage) -> dict[str, Any]:
    """Return the set fields, always with a role and a content, which templates concatenate."""
    return {"role": message.role, "content": message.content, **msgspec.to_builtins(message)}


class _Generation(Extension):
    """The block `{% generation %}…{% endgeneration %}` for training, rendered as its content."""

    tags = {"generation"}  # noqa: RUF012  as Jinja types it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}
    return environment


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode without Jinja's escapes of HTML characters."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
