"""fastokens gives the ids of `tokenizers`, or is not used."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from penstock.protocol.config import Config
from penstock.services.tokenizer import prompts
from penstock.services.tokenizer.prompts import Tokenizer as Prompts
from penstock.services.tokenizer.prompts import load_fast_encoder
from tests.search import scaled
from tests.tools.fuzz_tokenizer import differing

DEMO = Config().model_folder / "tokenizer.json"


def changed(folder: Path, **fields: Any) -> tuple[Path, Tokenizer]:
    """Return the demo model's tokenizer with other fields."""
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(DEMO.read_text()) | fields))
    return path, Tokenizer.from_file(str(path))


@pytest.mark.search
def test_ids_of_random_strings(qwen3_folder: Path) -> None:
    """`python -m tests.tools.fuzz_tokenizer FOLDER` tries a million."""
    assert differing(qwen3_folder, scaled(3500), seed=1) == []


def test_the_demo_model_and_qwen3_are_encoded_fast(qwen3_tokenizer: Prompts) -> None:
    assert load_fast_encoder(DEMO, Tokenizer.from_file(str(DEMO)))
    assert qwen3_tokenizer._fast


def test_an_unknown_kind_is_left_to_tokenizers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, tokenizer = changed(tmp_path, pre_tokenizer={"type": "BertPreTokenizer"})
    assert load_fast_encoder(path, tokenizer) is None
    assert "fastokens can't encode" in caplog.text


def test_other_ids_are_noticed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has a normalizer that the tokenizer which serves has not."""
    path, _ = changed(tmp_path, normalizer={"type": "Lowercase"})
    assert load_fast_encoder(path, Tokenizer.from_file(str(DEMO))) is None
    assert "other ids for" in caplog.text
    monkeypatch.setattr(prompts, "fastokens", None)
    assert load_fast_encoder(DEMO, Tokenizer.from_file(str(DEMO))) is None
