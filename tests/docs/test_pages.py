"""Rules for all pages of the documentation."""

import pytest

from tests.docs.pages import ROOT, Block, blocks
from tests.docs.reference import FOLDER, PAGES

NEEDS = {
    "needs a GPU",
    "needs Docker",
    "needs Kubernetes",
    "needs Ray on several machines",
    "needs Slurm",
    "needs vLLM",
    "needs a terminal of its own",
    "needs the network",
    "needs two GPUs",
}
"""why a block is not run by tests/docs/test_snippets.py; its `launch` commands are parsed"""


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


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


@pytest.mark.parametrize("name", list(PAGES))
def test_a_generated_page_is_up_to_date(name: str) -> None:
    assert (FOLDER / name).read_text() == PAGES[name](), "run `make docs`"
