"""Qwen3's chat templates make the token ids of transformers, from a request's body to the ids.

Three differences are known, and not made here: the order of a tool's own keys, keys of a tool that
OpenAI does not have, and numbers that JSON can't write (1e400).
"""

import functools
import json
from pathlib import Path

import msgspec
import pytest
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from penstock.protocol.messages.client import PromptFields, TokenizePromptRequest
from penstock.services.http.generation.schema import ChatRequest
from penstock.services.http.generation.to_generate_request import chat_fields
from penstock.services.http.shared.body import decode_body
from penstock.services.tokenizer.chat_template import PromptError
from penstock.services.tokenizer.prompts import Tokenizer
from tests.services.conftest import WithTemplate
from tests.services.dialogues import Dialogues, for_transformers

TEMPLATES = ["qwen3", "qwen3_older", "qwen3_instruct_2507", "qwen3_thinking_2507", "qwen3_coder"]
TEMPLATES += ["agent"]  # like those of Qwen3.5 to 3.8
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>"]


@functools.cache
def reference(folder: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))


def source_of(name: str, folder: Path) -> str:
    if name == "qwen3_older":
        config = json.loads((folder / "tokenizer_config.json").read_text())
        return str(config["chat_template"])
    return (Path(__file__).parent / "chat_templates" / f"{name}.jinja").read_text()


def our_ids(tokenizer: Tokenizer, body: dict[str, object]) -> list[int]:
    """Return the ids that `/v1/chat/completions` would compute, through all its messages."""
    fields = chat_fields(decode_body(msgspec.json.encode(body), ChatRequest))
    prompt = {name: fields[name] for name in PromptFields.__struct_fields__ if name in fields}
    frame = msgspec.msgpack.encode(TokenizePromptRequest(**prompt))
    reply = tokenizer.answer(msgspec.msgpack.decode(frame, type=TokenizePromptRequest))
    return reply.token_ids


@pytest.mark.parametrize("number", [40, pytest.param(500, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", TEMPLATES)
def test_token_ids_are_those_of_transformers(
    with_template: WithTemplate, qwen3_folder: Path, name: str, number: int
) -> None:
    source = source_of(name, qwen3_folder)
    tokenizer, theirs = with_template(source), reference(qwen3_folder)
    assert all(len(theirs.encode(token)) == 1 for token in SPECIAL)
    dialogues, num_equal = Dialogues(seed=number), 0
    while num_equal < number:
        body = dialogues.body()
        try:
            text = theirs.apply_chat_template(
                chat_template=source,
                tokenize=False,
                **for_transformers(body, joins_parts=name != "agent"),
            )
        except (TemplateError, TypeError, ValueError):  # so do we refuse it
            with pytest.raises(PromptError):
                our_ids(tokenizer, body)
            continue
        assert our_ids(tokenizer, body) == theirs.encode(text, add_special_tokens=False), body
        num_equal += 1
