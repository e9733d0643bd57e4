"""A Chromium for the tests of the page, and the pipeline whose page it shows."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.pipeline.conftest import Pipeline
from tests.pipeline.disturbed.page.browser import Pages, playwright

PROGRAMS = ("chromium-headless-shell", "chromium", "google-chrome")


@pytest.fixture(scope="module")
def site(disturbed: Pipeline) -> Iterator[Pipeline]:
    """Return a pipeline with two detokenizers."""
    for number in ("2", "1"):
        assert disturbed.run("scale", "detokenizer", number).returncode == 0
        if number == "2":
            yield disturbed


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start Chromium; without it, the tests of the page are skipped.

    Its headless shell draws no window around each page, which takes half of the CPU time. Its
    driver occupies the thread's event loop, so that others can't run one meanwhile.
    """
    path = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if path is None:
        pytest.skip("the page is tested in chromium")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def pages(site: Pipeline, browser: Any) -> Iterator[Pages]:
    """Open pages."""
    with Pages(browser, site.url) as opened:
        yield opened


@pytest.fixture
def page(pages: Pages) -> Any:
    """Return the page, with the key."""
    return pages.open()
