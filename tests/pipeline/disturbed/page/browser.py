"""Tools for tests of the page: pages that are watched, and actions of a user."""

import json
import re
from typing import Any, Self

import pytest

from tests.pipeline.http_api import KEY

TIMEOUT_MS = 60_000
playwright = pytest.importorskip(
    "playwright.sync_api", reason="the page is tested with the Python package playwright"
)
expect = playwright.expect
expect.set_options(timeout=TIMEOUT_MS)


class Pages:
    """Opens the page, and checks at the end that it asked nobody else and complained of nothing."""

    def __init__(self, browser: Any, address: str) -> None:
        self.errors: list[str] = []
        """what pages complained of; a test that breaks something on purpose clears it"""
        self._foreign: list[str] = []
        self._address = address
        self._browser = browser
        self._contexts: list[Any] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for context in self._contexts:
            context.close()
        assert not self._foreign
        assert not self.errors

    def open(self, has_key: bool = True, **options: Any) -> Any:
        """One more page, of a user of its own."""
        context = self._browser.new_context(**options)
        self._contexts.append(context)
        context.set_default_timeout(TIMEOUT_MS)
        if has_key:
            item = json.dumps(KEY)
            context.add_init_script(f"sessionStorage.setItem('penstock-api-key', {item})")
        page = context.new_page()
        page.on("request", self._see_request)
        page.on("console", self._see_message)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.goto(self._address)
        return page

    def _see_request(self, request: Any) -> None:
        if not request.url.startswith((self._address, "data:")):
            self._foreign.append(request.url)

    def _see_message(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)


def ask(page: Any, question: str) -> Any:
    """Send a message by keyboard; the turn that it begins."""
    page.locator("#prompt").fill(question)
    page.keyboard.press("Enter")
    return page.locator(".turn").last


def wait_for_answer(turn: Any) -> str:
    """Return the whole answer."""
    expect(turn).to_have_attribute("aria-busy", "false")
    text: str = turn.locator(".answer").inner_text()
    return text


def open_settings(page: Any) -> None:
    """Unfold the settings."""
    page.locator("#settings summary").click()
    expect(page.locator("#temperature")).to_be_visible()


def never_end(page: Any, max_tokens: int) -> None:
    """From now on answers have `max_tokens` tokens."""

    def change(route: Any) -> None:
        body = route.request.post_data_json | {"ignore_eos": True, "max_tokens": max_tokens}
        route.continue_(post_data=json.dumps(body))

    page.route("**/v1/chat/completions", change)


def answer_with(page: Any, *chunks: object) -> None:
    """From now on the page gets this stream."""
    texts = [one if isinstance(one, str) else json.dumps(one) for one in chunks]
    stream = "".join(f"data: {text}\n\n" for text in texts)
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(content_type="text/event-stream", body=stream),
    )


def process_box(page: Any, name: str) -> Any:
    """Return the element of one process."""
    return page.locator(f'.process[data-name="{name}"]')


def pid_of(page: Any, name: str) -> int:
    """As the page shows it."""
    shown = process_box(page, name).locator(".where")
    expect(shown).to_contain_text("pid")
    found = re.search(r"pid (\d+)", shown.inner_text())
    assert found
    return int(found[1])
