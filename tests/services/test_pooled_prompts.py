"""Prompts of requests with `pooling`: token ids as embedding models want them."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers.processors import TemplateProcessing

from penstock.protocol.config import Config
from penstock.protocol.messages.pipeline import TokenizedRequest, TokenizeRequest
from penstock.protocol.messages.sampling import Pooling, SamplingParams
from penstock.services.tokenizer.chat_template import PromptError
from penstock.services.tokenizer.prompts import Tokenizer


def request(**fields: Any) -> TokenizeRequest:
    pooled = TokenizedRequest("r", 0, SamplingParams(), pooling=Pooling())
    return TokenizeRequest(request=pooled, **fields)


@pytest.mark.parametrize(("side", "kept"), [("left", "hi"), ("right", "gh")])
def test_a_text_is_cut_before_the_tokens_that_the_tokenizer_adds(
    tmp_path: Path, side: str, kept: str
) -> None:
    """Texts keep the added tokens, as in transformers; token ids are cut without them."""
    own = HuggingFaceTokenizer.from_file(str(Config().model_folder / "tokenizer.json"))
    name, end = "<|endoftext|>", own.token_to_id("<|endoftext|>")
    own.post_processor = TemplateProcessing(f"$A {name}", special_tokens=[(name, end)])
    own.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path, max_model_len=64)
    cut = {"truncate_prompt_tokens": 3, "truncation_side": side}
    text = "ghi" if side == "left" else "ghx"
    ids = tokenizer.encode(request(prompt=text, **cut))[0]
    assert ids == [*(ord(one) for one in kept), end]
    assert tokenizer.encode(request(prompt=text))[0][-1] == end
    assert len(tokenizer.encode(request(prompt=[5, 6, 7, 8], **cut))[0]) == 3
    assert tokenizer.encode(request(prompt="gh", add_special_tokens=False, **cut))[0] == [103, 104]
    assert len(tokenizer.encode(request(prompt=text, truncate_prompt_tokens=1))[0]) == 1


def test_a_prompt_without_an_answer_may_fill_the_context() -> None:
    tokenizer = Tokenizer(Config().model_folder, max_model_len=64)
    ids, _ = tokenizer.encode(request(prompt="a" * 64))
    assert len(ids) == 64
    with pytest.raises(
        PromptError, match="got 65 tokens, expected up to 64 in the context of 64"
    ) as found:
        tokenizer.encode(request(prompt="a" * 65))
    assert found.value.too_long == (65, 64)
