"""Chat templates in each of the files in which checkpoints have them."""

import json
from pathlib import Path

import pytest

from penstock.protocol.tokenizer_file import read_chat_template

SEVERAL = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "own"}]


@pytest.mark.parametrize("file", ["chat_template.json", "tokenizer_config.json"])
@pytest.mark.parametrize("template", ["own", SEVERAL])
def test_one_template_or_several_by_name(tmp_path: Path, file: str, template: object) -> None:
    (tmp_path / file).write_text(json.dumps({"chat_template": template}))
    assert read_chat_template(tmp_path) == "own"
