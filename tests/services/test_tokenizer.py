"""Prompts, conversations and token ids become token ids, or a sentence says why not."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq

from penstock.protocol.client import ChatMessage
from penstock.protocol.config import Config
from penstock.protocol.endpoints import Endpoints
from penstock.protocol.messages import Tokenized, TokenizeRequest
from penstock.protocol.sampling import SamplingParams
from penstock.services.tokenizer import PromptError, Tokenizer, TokenizerProcess

TOKENIZER = Tokenizer(Config().model_folder, max_model_len=64)


def request(**fields: object) -> TokenizeRequest:
    return TokenizeRequest("r", 0, SamplingParams(), **fields)  # type: ignore[arg-type]


def test_text() -> None:
    assert len(TOKENIZER.encode(request(prompt="née"))) == len("née".encode())


def test_token_ids_are_taken_as_they_are() -> None:
    assert TOKENIZER.encode(request(prompt=[5, 6])) == [5, 6]


def test_messages_go_through_the_chat_template() -> None:
    messages = [ChatMessage(role="user", content="hi")]
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert TOKENIZER.encode(request(messages=messages)) == TOKENIZER.encode(request(prompt=text))


def test_the_context_limit_and_one_more() -> None:
    assert len(TOKENIZER.encode(request(prompt="x" * 63))) == 63
    with pytest.raises(PromptError, match=r"64 tokens; at most 63 .* context of 64") as caught:
        TOKENIZER.encode(request(prompt="x" * 64))
    assert caught.value.field == "prompt"


def test_the_gateway_is_told_how_long_a_prompt_is(tmp_path: Path) -> None:
    with zmq.Context() as context:
        at = Endpoints(*(f"ipc://{tmp_path}/{name}" for name in Endpoints._fields))
        own = SimpleNamespace(
            config=Config(), context=context, endpoints=at, name="tokenizer.1", identity=b"t"
        )
        process = TokenizerProcess(own)  # type: ignore[arg-type]
        assert process.handle(request(prompt="née")) == Tokenized("r", 0, 4)
        for channel in (process.gateway, process.scheduler):
            channel.socket.close(linger=0)
