"""`bad_words` as the token sequences that must not be generated."""

import json
import shutil
from pathlib import Path

import pytest

from penstock.protocol.config import Config
from penstock.services.tokenizer.chat_template import PromptError
from penstock.services.tokenizer.prompts import Tokenizer, encode_bad_words


def test_bad_words_of_qwen3(qwen3_tokenizer: Tokenizer) -> None:
    """With and without a space before it, where that makes other tokens."""
    tokenizer = qwen3_tokenizer.backend

    def texts(word: str) -> list[list[str]]:
        found = encode_bad_words(tokenizer, [word])
        return [[tokenizer.decode([one], skip_special_tokens=False) for one in w] for w in found]

    assert texts("dog") == texts(" dog") == [["dog"], [" dog"]]
    assert texts("penstock") == [["pen", "stock"], [" pen", "stock"]]
    assert texts("idiot") == [["id", "iot"], [" idiot"]]
    assert texts("\n") == [["\n"], [" \n"]]
    assert texts("<|im_end|>") == [["<|im_end|>"]]
    assert texts("  ") == [["  "], ["   "]]
    both = encode_bad_words(tokenizer, ["dog", "penstock"])
    assert both == encode_bad_words(tokenizer, ["dog"]) + encode_bad_words(tokenizer, ["penstock"])
    assert encode_bad_words(tokenizer, []) == []


def test_bad_words_of_bytes() -> None:
    """The word's bytes; those of the word with a space end with them."""
    tokenizer = Tokenizer(Config().model_folder, max_model_len=64).backend
    assert encode_bad_words(tokenizer, ["é", " ab"]) == [[0xC3, 0xA9], [97, 98]]


def test_a_bad_word_without_a_token(tmp_path: Path) -> None:
    made = json.loads((Config().model_folder / "tokenizer.json").read_text())
    made["normalizer"] = {"type": "Strip", "strip_left": True, "strip_right": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    shutil.copy(Config().model_folder / "tokenizer_config.json", tmp_path)
    with pytest.raises(PromptError, match=r"bad_words\[1\]: got ' ', expected") as caught:
        encode_bad_words(Tokenizer(tmp_path, max_model_len=64).backend, ["a", " "])
    assert caught.value.field == "bad_words"
