"""Rules for all pages of the documentation."""

import re
from pathlib import Path

import msgspec
import pytest

from penstock.protocol.config import OPTIONS
from penstock.protocol.messages.client import codec_of
from penstock.services.gateway.admission import RefusedError, decode_request
from tests.docs.pages import PAGES as TEXTS
from tests.docs.pages import ROOT, Block, blocks
from tests.docs.reference import FOLDER, PAGES, STATUSES

DOCS = ROOT / "docs"
RESULTS = [page for page in (DOCS / "benchmarks").glob("*.md") if page.stem != "index"]
THIS = Path(__file__)
VARIABLES = {
    name for page in TEXTS for name in re.findall(r"PENSTOCK_[A-Z_]+[A-Z]", page.read_text())
}
NEEDS = {
    "needs a GPU",
    "needs Docker",
    "needs Kubernetes",
    "needs Ray on several machines",
    "needs Slurm",
    "needs vLLM",
    "needs a terminal of its own",
    "needs an embedding model",
    "needs the network",
    "needs two GPUs",
}
"""why a block is not run by tests/docs/test_snippets.py; its `launch` commands are parsed"""


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_site_leads_to_every_page() -> None:
    """Raw results are linked from the page of the benchmarks."""
    linked = set(re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    index = (DOCS / "benchmarks" / "index.md").read_text()
    linked |= {f"benchmarks/{name}" for name in re.findall(r"\(([\w/-]+\.md)\)", index)}
    assert linked == {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}


def rows_of(page: Path) -> list[list[str]]:
    """Return the rows of a page's tables, without markup."""
    lines = [line for line in page.read_text().splitlines() if line.startswith("|")]
    rules = {index for index, line in enumerate(lines) if re.fullmatch(r"[|: -]*-[|: -]*", line)}
    heads = {index - 1 for index in rules}
    rows = [line[1:-1].split("|") for n, line in enumerate(lines) if n not in rules | heads]
    return [[re.sub(r"\*\*|`", "", cell).strip() for cell in row] for row in rows]


@pytest.mark.parametrize("page", RESULTS, ids=lambda page: page.stem)
def test_the_results_of_a_page_are_its_figures(page: Path) -> None:
    results = msgspec.json.decode((page.parent / "results" / f"{page.stem}.json").read_bytes())
    tables = results["tables"]
    assert [row for table in tables for row in table["rows"]] == rows_of(page)
    assert all(table["hardware"] and table["written"] for table in tables)


@pytest.mark.parametrize("variable", sorted(VARIABLES))
def test_a_variable_is_read(variable: str) -> None:
    """Each option has one; a few others are read by the command line or by tests."""
    options = {f"PENSTOCK_{field.upper()}" for field in OPTIONS}
    assert variable in options or any(
        variable in path.read_text() for path in (ROOT / "tests").rglob("*.py") if path != THIS
    )


@pytest.mark.parametrize("block", list(blocks("sh", "bash", "python")), ids=str)
def test_a_block_is_run_or_says_what_it_needs(block: Block) -> None:
    if block.needs.startswith("examples/"):  # tests/docs/test_snippets.py runs these files
        assert block.code == (ROOT / block.needs).read_text()
        return
    assert not block.needs or block.needs in NEEDS
    assert block.language != "bash", "write sh: one name for shells"


@pytest.mark.parametrize("block", list(blocks("python")), ids=str)
def test_python_parses(block: Block) -> None:
    compile(block.code, str(block), "exec")


def test_the_error_of_the_guide_is_the_gateways() -> None:
    text = (DOCS / "guides" / "zeromq-api.md").read_text()
    (example,) = re.findall(r'^  "message": "(.*)",$', text, re.M)
    frame = b'{"prompt": "x", "temperature": 3.5}'
    with pytest.raises(RefusedError, match=re.escape(example)):
        decode_request(codec_of(frame), frame, 1000, 1000)


def test_every_status_is_documented() -> None:
    sources = (ROOT / "services" / "http").rglob("*.py")
    used = {int(n) for path in sources for n in re.findall(r"[( ]([45]\d\d)[,)]", path.read_text())}
    assert len(used) > 5
    assert not used - STATUSES.keys()


@pytest.mark.parametrize("name", list(PAGES))
def test_a_generated_page_is_up_to_date(name: str) -> None:
    assert (FOLDER / name).read_text() == PAGES[name](), "run `make docs`"
