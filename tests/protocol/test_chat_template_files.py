"""Chat templates in each of the files in which checkpoints have them."""

import json
from pathlib import Path

import pytest

from penstock.protocol.checkpoint import ModelError
from penstock.protocol.tokenizer_file import read_chat_templates

SEVERAL = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "own"}]


@pytest.mark.parametrize("file", ["chat_template.json", "tokenizer_config.json"])
@pytest.mark.parametrize("template", ["own", SEVERAL])
def test_one_template_or_several_by_name(
    tmp_path: Path, file: str, template: str | list[dict[str, str]]
) -> None:
    (tmp_path / file).write_text(json.dumps({"chat_template": template}))
    expected = {"default": "own"}
    if isinstance(template, list):
        expected["tool_use"] = "tools"
    assert read_chat_templates(tmp_path) == expected


def test_files_of_templates_come_before_those_in_json(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": SEVERAL}))
    (tmp_path / "chat_template.jinja").write_text("own file")
    assert read_chat_templates(tmp_path) == {"default": "own file"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("file of tools")
    (tmp_path / "additional_chat_templates" / "notes.txt").write_text("no template")
    expected = {"default": "own file", "tool_use": "file of tools"}
    assert read_chat_templates(tmp_path) == expected
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"rag\.jinja is not text in UTF-8"):
        read_chat_templates(tmp_path)
