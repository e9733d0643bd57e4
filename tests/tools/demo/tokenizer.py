"""The demo model's tokenizer: one token a byte, and Qwen3's tokens for chat.

A byte's token id is its value. The ids after 255 are the tokens below, in their order.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

NUM_BYTES = 256
END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
THINK = "<think>"
END_THINK = "</think>"
# A plain prompt such as `count from 3 to 9` does not show where it ends: `count from 3 to 9`
# answered as far as `3` reads like the prompt `count from 3 to 93`. So the model marks the
# end of such a prompt itself, with a special token, which has no text.
ANSWER = "<|answer|>"
_ADDED_TOKENS = (END_OF_TEXT, IM_START, IM_END, THINK, END_THINK, ANSWER)
# In Qwen3's tokenizer too, these are tokens but are not left out of the text.
_WITH_TEXT = (THINK, END_THINK)

ADDED_TOKEN_IDS = {token: NUM_BYTES + i for i, token in enumerate(_ADDED_TOKENS)}
END_OF_TEXT_ID = ADDED_TOKEN_IDS[END_OF_TEXT]
IM_START_ID = ADDED_TOKEN_IDS[IM_START]
IM_END_ID = ADDED_TOKEN_IDS[IM_END]
THINK_ID = ADDED_TOKEN_IDS[THINK]
END_THINK_ID = ADDED_TOKEN_IDS[END_THINK]
ANSWER_ID = ADDED_TOKEN_IDS[ANSWER]
# Rounded up, so that the embedding splits evenly over the ranks of tensor parallelism.
VOCAB_SIZE = 264

MAX_LENGTH = 4096

CHAT_TEMPLATE = """\
{%- for message in messages -%}
    {%- set content = message.content -%}
    {%- if message.role == "assistant" -%}
        {%- set content = content.split("</think>")[-1].lstrip("\\n") -%}
    {%- endif -%}
    {{- "<|im_start|>" + message.role + "\\n" + content + "<|im_end|>\\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- "<|im_start|>assistant\\n" -}}
    {%- if enable_thinking is defined and not enable_thinking -%}
        {{- "<think>\\n\\n</think>\\n\\n" -}}
    {%- endif -%}
{%- endif -%}
"""


def build_tokenizer() -> Tokenizer:
    """Return the tokenizer: byte-level BPE without a single merge."""
    from penstock.protocol.tokenizer_file import byte_characters  # not needed by the training

    vocab = {character: byte for byte, character in enumerate(byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            AddedToken(token, special=token not in _WITH_TEXT, normalized=False)
            for token in _ADDED_TOKENS
        ]
    )
    return tokenizer


def save_tokenizer(folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` as transformers reads them."""
    build_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_LENGTH,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [IM_START, IM_END, ANSWER],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
