"""Texts and conversations on the page, in headless Chromium."""

from typing import Any

import pytest

from tests.pipeline.browser import Pages, answer_with, ask, expect, wait_for_answer
from tests.pipeline.test_page import CHROMIUM, browser, page, pages, site

__all__ = ["browser", "page", "pages", "site"]
"""fixtures"""
pytestmark = [
    pytest.mark.pipeline,
    pytest.mark.skipif(CHROMIUM is None, reason="the page is tested in chromium"),
]
MARKDOWN = """# Title
Some **bold**, *italic* and `code <b>`; 2*3*4 and [a link](https://example.com/x), \
[none](javascript:alert(1)).

- one
  - inner **two**
- three

3. third
4. fourth

> quoted

| a | b |
|---|---|
| 1 | `2` |

---
~~~
not *closed* <img src=x onerror=alert(1)>"""


def test_markdown_is_drawn_as_it_comes(page: Any) -> None:
    deltas = [{"choices": [{"index": 0, "delta": {"content": one}}]} for one in MARKDOWN]
    answer_with(page, *deltas, "[DONE]")
    turn = ask(page, "everything")
    wait_for_answer(turn)
    shown = turn.locator(".answer")
    expect(shown.locator("h3")).to_have_text("Title")
    expect(shown.locator("p strong")).to_have_text("bold")
    expect(shown.locator("em")).to_have_text("italic")
    expect(shown.locator("p code")).to_have_text("code <b>")
    expect(shown.locator("a")).to_have_count(1)
    expect(shown.locator("a")).to_have_attribute("href", "https://example.com/x")
    expect(shown.locator("p").first).to_contain_text("2*3*4")
    expect(shown.locator("ul ul li")).to_have_text("inner two")
    expect(shown.locator(":scope > ul > li")).to_have_count(2)
    expect(shown.locator("ol")).to_have_attribute("start", "3")
    expect(shown.locator("blockquote")).to_have_text("quoted")
    expect(shown.locator("td")).to_have_text(["1", "2"])
    expect(shown.locator("hr")).to_have_count(1)
    expect(shown.locator("pre")).to_have_text("not *closed* <img src=x onerror=alert(1)>")
    expect(shown.locator("img, b")).to_have_count(0)


def test_a_long_line_of_stars_does_not_block_the_page(page: Any) -> None:
    for text in ("**a `b *c [d](" * 1200, "**bold** " * 2500):
        answer_with(page, {"choices": [{"index": 0, "delta": {"content": text}}]}, "[DONE]")
        turn = ask(page, "stars")
        assert len(wait_for_answer(turn)) > 10_000
    expect(turn.locator(".answer strong")).to_have_count(0)  # it is too long to be drawn


def test_a_reload_keeps_the_conversation(page: Any) -> None:
    page.get_by_label("System prompt").fill("Be brief.")
    sent: list[Any] = []
    page.on("request", lambda one: sent.append(one.post_data_json) if one.post_data else None)
    assert wait_for_answer(ask(page, "17+25=")) == "42"
    assert sent[-1]["messages"][0] == {"role": "system", "content": "Be brief."}
    note = page.locator(".note").inner_text()
    page.reload()
    expect(page.locator(".turn")).to_have_count(1)
    expect(page.locator(".answer")).to_have_text("42")
    expect(page.locator(".note")).to_have_text(note)
    expect(page.locator("#empty")).to_be_hidden()
    expect(page.get_by_label("System prompt")).to_have_value("Be brief.")
    wait_for_answer(ask(page, "1+1="))
    assert [one["content"] for one in sent[-1]["messages"][1:]] == ["17+25=", "42", "1+1="]
    page.locator("#new").click()
    page.reload()
    expect(page.locator("#empty")).to_be_visible()
    expect(page.locator(".turn")).to_have_count(0)


def test_the_empty_page_says_what_the_demo_model_can_do(page: Any) -> None:
    expect(page.locator("#demo")).to_be_visible()
    page.get_by_role("button", name="count from 3 to 9").click()
    assert wait_for_answer(page.locator(".turn")) == "3 4 5 6 7 8 9"
    expect(page.locator("#demo")).to_be_hidden()


def test_a_phone_has_a_small_composer(pages: Pages) -> None:
    page = pages.open(viewport={"width": 390, "height": 844}, has_touch=True)
    expect(page.locator("#state")).to_have_text("ready")
    expect(page.locator("#temperature")).to_be_hidden()
    composer = page.locator("#composer").bounding_box()
    assert composer["height"] < 844 / 5
    assert composer["y"] + composer["height"] <= 844
    page.locator("#settings summary").click()
    expect(page.locator("#temperature")).to_be_visible()
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= 390
