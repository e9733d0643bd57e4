"""Qwen3's tokenizer, which takes seconds to load."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.services.tokenizer.chat_template import ChatTemplate
from penstock.services.tokenizer.prompts import Tokenizer

WithTemplate = Callable[[str | None], Tokenizer]


@pytest.fixture(scope="session")
def qwen3_tokenizer(qwen3_folder: Path) -> Tokenizer:
    """Return the published tokenizer and template, with room for any prompt."""
    return Tokenizer(qwen3_folder, max_model_len=1 << 20)


@pytest.fixture
def with_template(qwen3_tokenizer: Tokenizer, tmp_path: Path) -> WithTemplate:
    """Return a function that replaces the template of Qwen3's tokenizer, except by None."""

    def replaced(source: str | None) -> Tokenizer:
        made = copy.copy(qwen3_tokenizer)
        if source is not None:
            (tmp_path / "chat_template.jinja").write_text(source)
            made._chat_template = ChatTemplate(tmp_path)
        return made

    return replaced
