"""Chat templates: a conversation as the text that the model was trained on.

They are Jinja templates that come with a checkpoint, written for transformers' environment
(`apply_chat_template`), which this one equals without importing transformers and, with it, torch.
"""

import json
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.protocol.checkpoint import ModelError
from penstock.protocol.client import ChatMessage

NOT_FOR_CLIENTS = frozenset(
    {"messages", "tools", "chat_template", "tokenize", "add_generation_prompt"}
    | {"continue_final_message", "conversation", "return_dict", "return_tensors"}
)
"""arguments of `apply_chat_template` that `chat_template_kwargs` can't give"""
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


class ChatTemplateError(ValueError):
    """The template can't make a prompt of this conversation, and why."""


class ChatTemplate:
    """The chat template of a checkpoint; one without it serves prompts only."""

    def __init__(self, folder: Path) -> None:
        """Raises ModelError for files that can't be read and templates that are none."""
        try:
            config = _tokenizer_config(folder / "tokenizer_config.json")
            file = folder / "chat_template.jinja"
            source = file.read_text() if file.exists() else config.get("chat_template")
            self._template = source and _environment().from_string(source)
        except (OSError, msgspec.MsgspecError, TemplateError, TypeError) as error:
            raise ModelError(f"the chat template of {folder} can't be read: {error}") from error
        self._special_tokens = {
            name: token["content"] if isinstance(token, dict) else token
            for name in SPECIAL_TOKENS
            if (token := config.get(name))
        }

    def render(
        self,
        messages: list[ChatMessage],
        tools: list[dict[str, Any]] | None,
        kwargs: dict[str, Any],
    ) -> str:
        """The conversation up to where the assistant's answer begins. Raises ChatTemplateError.

        A template that knows no tools leaves them out.
        """
        if not self._template:
            raise ChatTemplateError("the model has no chat template; give a prompt")
        try:
            return self._template.render(
                {
                    **self._special_tokens,
                    **kwargs,
                    "messages": [_as_map(message) for message in messages],
                    "tools": tools,
                    "documents": kwargs.get("documents"),
                    "add_generation_prompt": True,
                }
            )
        except _REFUSALS as error:
            raise ChatTemplateError(f"the chat template refused messages: {error}") from error


_REFUSALS = (
    *(TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError),
    *(TypeError, ValueError),
)
"""what a template raises, itself or for data that it is not made for"""


def _tokenizer_config(path: Path) -> dict[str, Any]:
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Any]) if path.exists() else {}


def _as_map(message: ChatMessage) -> dict[str, Any]:
    """Only what is set, but always a role and a content: templates add strings to it."""
    return {"role": message.role, "content": message.content, **msgspec.to_builtins(message)}


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`, which marks what is trained on, is its content."""

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
    """Jinja's own escapes what is special in HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
