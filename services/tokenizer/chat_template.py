"""Chat templates, which render a conversation in the text format of the model's training.

Chat templates are Jinja templates of a checkpoint, written for the environment of transformers
(`apply_chat_template`). This module has an equal environment, without transformers and torch.
"""

import contextlib
import functools
import json
import logging
import signal
from collections.abc import Mapping
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import msgspec
from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.protocol.checkpoint import ModelError
from penstock.protocol.messages.client import ChatMessage, ErrorReply, PromptFields
from penstock.protocol.tokenizer_file import choose_template, read_chat_templates
from penstock.protocol.transport.channel import DECODE_ERRORS
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
REASONING_EFFORT = "reasoning_effort"  # variable of the amount of reasoning
EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")  # its values in OpenAI's API
# only key of arguments that are not a JSON object, for templates that need an object
INVALID_JSON = "INVALID_JSON"
NO_DEFAULTS: Mapping[str, Any] = MappingProxyType({})
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

    def __init__(self, folder: Path, defaults: Mapping[str, Any] = NO_DEFAULTS) -> None:
        """Read the templates. Must run in the main thread, which gets the time limit's signal.

        defaults: variables of the template, unless a request sets them.
        """
        signal.signal(signal.SIGVTALRM, _end)
        self._defaults = defaults
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
        continues = request.continue_final_message
        kwargs = {**self._defaults, **request.chat_template_kwargs}
        if taken := sorted(NOT_FOR_CLIENTS & kwargs.keys()):
            text = f"chat_template_kwargs: got {taken[0]}, which it can't set; leave it out"
            raise PromptError("chat_template_kwargs", text)
        adds_prompt = request.add_generation_prompt
        if request.chat_template is not None:
            own = None
        if own is not None and (effort := kwargs.get(REASONING_EFFORT)) in EFFORTS:
            kwargs[REASONING_EFFORT] = _known_effort(own, effort)
        messages = [_as_map(message, own) for message in request.messages or []]
        if continues and messages:
            _add_text(messages[-1], _END_OF_FINAL_MESSAGE)
        variables = {
            **self._special_tokens,
            **kwargs,
            "messages": messages,
            "tools": request.tools,
            "documents": kwargs.get("documents"),
            "add_generation_prompt": not continues if adds_prompt is None else adds_prompt,
        }
        if own is None:
            text = _render_in_child(request.chat_template or "", variables)
        else:
            text = _render_adapted(own, variables)
        return _cut(text) if continues else text


def _render_adapted(template: Template, variables: dict[str, Any]) -> str:
    """Render messages, adapted if the template refuses them. Raises PromptError.

    Agents do not know what the templates of Qwen3.5 and later refuse.
    """
    try:
        return _render_own(template, variables)
    except PromptError as error:
        if error.__cause__ is None:  # a limit
            raise
        refusal = error
    given = variables["messages"]
    with_objects = _with_objects(given)
    for messages in with_objects, _with_one_system(with_objects):
        if messages != given:
            with contextlib.suppress(PromptError):
                return _render_own(template, variables | {"messages": messages})
    raise refusal


def _with_objects(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in which arguments that are not an object are the value of INVALID_JSON."""
    return [
        message | {"tool_calls": [_with_object(call) for call in calls]}
        if (calls := message.get("tool_calls"))
        else message
        for message in messages
    ]


def _with_one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with at most one system message, the first.

    The first system messages are joined. Later ones become messages of the user at their places, so
    that the prompt before them stays in the prefix cache.
    """
    first = list(takewhile(lambda message: message["role"] == "system", messages))
    others = messages[len(first) :]
    text = "\n\n".join(filter(None, map(_text_of, first)))
    return [
        *(first if len(first) < 2 else [first[0] | {"content": text}]),
        *(one | {"role": "user"} if one["role"] == "system" else one for one in others),
    ]


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(text := function.get("arguments"), str):
        return call
    return call | {"function": function | {"arguments": {INVALID_JSON: text}}}


def _text_of(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _add_text(message: dict[str, Any], text: str) -> None:
    if isinstance(message["content"], str):
        message["content"] += text
    else:
        message["content"][-1]["text"] += text


@functools.lru_cache
def _known_effort(template: Template, effort: str) -> str:
    """Return the nearest effort that the template takes, preferably a higher one."""
    place = EFFORTS.index(effort)
    nearest = [*EFFORTS[place:], *reversed(EFFORTS[:place])]
    taken = (name for name in nearest if _trial(template, **{REASONING_EFFORT: name}))
    return next(taken, effort)


@functools.lru_cache
def _takes_parts(template: Template) -> bool:
    """Return whether the template joins the parts of a content itself."""
    parts = [{"type": "text", "text": text} for text in ("\ue000", "\ue001")]
    return "\ue000\ue001" in _trial(template, content=parts)


def _trial(template: Template, content: Any = "a", **variables: Any) -> str:
    """Return the rendering of one message, or an empty text if the template refuses it."""
    messages = [{"role": "user", "content": content}]
    try:
        return _render_own(template, {"messages": messages, "tools": None, **variables})
    except PromptError:
        return ""


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
        raise PromptError("chat_template", f"chat_template: got one that {LIMITS}; simplify it")
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


def _as_map(message: ChatMessage, template: Template | None) -> dict[str, Any]:
    """Return the set fields, always with a role and a content, which templates concatenate.

    Arguments of calls in JSON become maps. Parts of the content stay parts if the template joins
    them, as with transformers; otherwise line breaks join them, as in vLLM.
    """
    made = {"role": message.role, "content": message.content, **msgspec.to_builtins(message)}
    if isinstance(message.content, list):
        parts = [{"type": "text", "text": text} for text in message.content]
        takes_parts = template is not None and _takes_parts(template) and parts
        made["content"] = parts if takes_parts else "\n".join(message.content)
    for call in made.get("tool_calls") or ():
        function = call.get("function", call)
        if isinstance(function, dict) and isinstance(text := function.get("arguments"), str):
            function["arguments"] = _decoded(text)
    return made


def _decoded(arguments: str) -> Any:
    """Return JSON arguments as a map; other text stays text."""
    try:
        decoded = msgspec.json.decode(arguments or "{}")
    except DECODE_ERRORS:
        return arguments
    return decoded if isinstance(decoded, dict) else arguments


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
