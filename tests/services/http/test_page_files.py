"""Files of the page: what they load, and the headers that they are served with."""

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from penstock.services.http import app

FOLDER = Path(app.__file__).parent / "page"
SOURCES = {path.name: path.read_text() for path in FOLDER.iterdir()}
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}


class Elements(HTMLParser):
    """Elements of a page with their attributes."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


ELEMENTS = Elements(SOURCES["index.html"]).found


def test_files_are_served_with_a_strict_policy(serve: Callable[..., Any]) -> None:
    with serve().client() as client:
        for name in ("", *(f"page/{name}" for name in SOURCES)):
            answer = client.get(f"/{name}")
            assert answer.status_code == 200
            suffix = Path(name or "index.html").suffix
            assert answer.headers["content-type"].split(";")[0] == MEDIA_TYPES[suffix]
            assert answer.headers["x-content-type-options"] == "nosniff"
            rules = dict(
                rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; ")
            )
            assert rules["default-src"] == rules["base-uri"] == "'none'"
            assert rules["frame-ancestors"] == rules["form-action"] == "'none'"
            assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
            assert not re.search("unsafe|http:|https:|[*]", " ".join(rules.values()))
        for name in ("none.js", "..%2fapp.py", "../app.py"):
            assert client.get(f"/page/{name}").status_code == 404


def test_the_page_has_neither_inline_scripts_nor_inline_styles() -> None:
    """The policy forbids both: they would be dead."""
    for tag, attributes in ELEMENTS:
        assert tag != "style"
        assert tag != "script" or "src" in attributes
        assert not [name for name in attributes if name == "style" or name.startswith("on")]


def test_every_file_is_used_and_none_is_elsewhere() -> None:
    loaded = {"index.html"}
    for _, attributes in ELEMENTS:
        address = attributes.get("src") or attributes.get("href") or ""
        if not address.startswith("data:") and address:
            loaded.add(address.removeprefix("page/"))
    for name, source in SOURCES.items():
        imports = re.findall(r'^import .* from "\./([\w.]+)";$', source, re.MULTILINE)
        assert len(imports) == len(re.findall(r"^import\b|\bimport\(", source, re.MULTILINE)), name
        loaded.update(imports)
        assert "url(" not in source
        assert "@import" not in source
    assert loaded == set(SOURCES)


def test_text_never_becomes_markup() -> None:
    parsers = "innerHTML|outerHTML|insertAdjacentHTML|document.write|DOMParser|eval|Function\\("
    for name, source in SOURCES.items():
        assert not re.search(rf"\b({parsers})", source), name


@pytest.mark.parametrize("name", SOURCES)
def test_elements_that_scripts_use_exist(name: str) -> None:
    ids = {attributes["id"] for _, attributes in ELEMENTS if "id" in attributes}
    assert set(re.findall(r'\$\("([\w-]+)"\)', SOURCES[name])) <= ids
