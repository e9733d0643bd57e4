"""Texts and conversations on the page, in headless Chromium."""

import re
from typing import Any

import pytest

from tests.pipeline.disturbed.page.browser import (
    Pages,
    answer_with,
    ask,
    expect,
    never_end,
    open_settings,
    wait_for_answer,
)

pytestmark = pytest.mark.pipeline
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


def test_long_answers_do_not_block_the_page(page: Any) -> None:
    for piece in ("**a `b *c [d](", "**bold** ", "```\ncode\n```\n"):
        text = piece * (100_000 // len(piece))
        parts = [text[at : at + 200] for at in range(0, len(text), 200)]
        deltas = [{"choices": [{"index": 0, "delta": {"content": one}}]} for one in parts]
        answer_with(page, *deltas, "[DONE]")
        turn = ask(page, "stars")
        assert len(wait_for_answer(turn)) > 30_000
    expect(turn.locator("pre")).to_have_count(len(text) // len(piece))


def test_a_reload_keeps_the_conversation(page: Any) -> None:
    open_settings(page)
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


NUM_KEPT = """
() => new Promise((resolve) => { indexedDB.open("penstock").onsuccess = ({ target }) => {
  const store = target.result.transaction("conversations").objectStore("conversations");
  store.count().onsuccess = ({ target }) => resolve(target.result);
}; })"""


def test_conversations_are_kept_until_they_are_deleted(page: Any) -> None:
    listed = page.locator("#conversation-list li")
    assert wait_for_answer(ask(page, "17+25=")) == "42"
    page.locator("#new").click()
    assert wait_for_answer(ask(page, "count from 3 to 9")) == "3 4 5 6 7 8 9"
    page.reload()
    page.get_by_role("button", name="Conversations").click()
    expect(listed).to_have_text(["count from 3 to 9×", "17+25=×"])
    page.get_by_role("button", name="17+25=", exact=True).click()
    expect(listed.first).to_be_hidden()  # the drawer closes
    expect(page.locator(".answer")).to_have_text("42")
    wait_for_answer(ask(page, "1+1="))
    page.get_by_role("button", name="Conversations").click()
    expect(listed).to_have_text(["17+25=×", "count from 3 to 9×"])
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete 17+25=").click()
    expect(page.locator(".answer")).to_have_text("3 4 5 6 7 8 9")
    assert page.evaluate(NUM_KEPT) == 1  # read after the deletion, which a reload might cut off
    page.reload()
    expect(page.locator(".answer")).to_have_text("3 4 5 6 7 8 9")
    expect(listed).to_have_count(1)


def test_an_answer_that_a_reload_ends_is_kept_as_far_as_it_was_received(page: Any) -> None:
    never_end(page, 3000)
    ask(page, "count from 3 to 9")
    turns = (
        "() => new Promise((resolve) => { indexedDB.open('penstock').onsuccess = ({ target }) =>"
    )
    turns += " { target.result.transaction('conversations').objectStore('conversations').getAll()"
    turns += ".onsuccess = (event) => resolve(event.target.result[0].turns[0].answer); }; })"
    while not page.evaluate(turns):
        page.wait_for_event("request")  # of the status
    page.reload()
    expect(page.locator(".answer")).to_contain_text("3 4")
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".turn")).to_have_attribute("aria-busy", "true")
    page.keyboard.press("Escape")
    expect(page.locator(".note")).to_have_text("stopped")


def test_an_edited_question_is_asked_again(page: Any) -> None:
    assert wait_for_answer(ask(page, "17+25=")) == "42"
    wait_for_answer(ask(page, "1+1="))
    page.get_by_role("button", name="Edit").first.click()
    page.get_by_label("Edited message").first.fill("count from 3 to 9")
    page.keyboard.press("Enter")
    expect(page.locator(".turn")).to_have_count(1)
    assert wait_for_answer(page.locator(".turn")) == "3 4 5 6 7 8 9"
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".user")).to_have_text("count from 3 to 9")
    assert wait_for_answer(page.locator(".turn")) == "3 4 5 6 7 8 9"


def test_a_tool_call_is_shown_and_its_result_sent(page: Any) -> None:
    open_settings(page)
    page.get_by_label("Tools").fill('{"name": "take", "parameters": {"type": "object"}}')
    sent: list[Any] = []
    page.on("request", lambda one: sent.append(one.post_data_json) if one.post_data else None)
    call = '<tool_call>{"name": "take", "arguments": {"x": "<b>"}}</tool_call>'
    turn = ask(page, f"repeat: {call}")
    assert wait_for_answer(turn) == ""
    expect(turn.locator(".call-name")).to_have_text("take")
    expect(turn.locator(".call pre")).to_have_text('{\n  "x": "<b>"\n}')
    page.reload()
    page.get_by_label("Result of take").fill("took it")
    page.get_by_role("button", name="Send results").click()
    expect(page.locator(".turn")).to_have_count(2)
    wait_for_answer(page.locator(".turn").last)
    expect(page.locator(".turn").last.locator(".user")).to_contain_text("took it")
    _, asked, result = sent[-1]["messages"]
    assert [one["function"]["name"] for one in asked["tool_calls"]] == ["take"]
    tool = {"role": "tool", "tool_call_id": asked["tool_calls"][0]["id"], "content": "took it"}
    assert result == tool
    assert sent[-1]["tools"][0]["function"]["name"] == "take"


def test_tools_that_are_not_json_are_refused(page: Any) -> None:
    open_settings(page)
    page.get_by_label("Tools").fill("take")
    turn = ask(page, "17+25=")
    expect(turn.locator(".failure")).to_contain_text("Tools: got invalid JSON")
    page.get_by_label("Tools").fill("")
    turn.get_by_role("button", name="Try again").click()
    assert wait_for_answer(turn) == "42"


def test_metrics_are_plotted_during_load(page: Any) -> None:
    never_end(page, 3000)
    ask(page, "count from 3 to 9")
    page.get_by_role("tab", name="Metrics").click()
    figure = page.locator("figure", has_text="Tokens per second")
    expect(figure.locator("b").first).to_have_text(re.compile("[1-9]"))
    for title in ("Time to first token", "Inter-token latency"):
        values = page.locator("figure", has_text=title).locator("b")
        expect(values.first).to_have_text(re.compile("[1-9].* m?s"))
    running = page.locator("figure", has_text="running")
    expect(running.locator("b").first).to_have_text("1")
    expect(running.locator("path.line-0")).to_have_attribute("d", re.compile("M.*L"))
    expect(running.locator("svg")).to_have_attribute("aria-label", re.compile("running 1"))
    page.reload()  # the view is kept
    expect(page.get_by_role("tab", name="Metrics")).to_have_attribute("aria-selected", "true")
    expect(page.locator("#plots")).to_be_visible()


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
    open_settings(page)
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= 390


def say(page: Any, text: str) -> Any:
    """Return the turn that the model answers with this text."""
    answer_with(page, {"choices": [{"index": 0, "delta": {"content": text}}]}, "[DONE]")
    turn = ask(page, "17+25=")
    wait_for_answer(turn)
    return turn.locator(".answer")


def test_formulas_are_mathml_and_never_markup(page: Any) -> None:
    hostile = "<script>window.hurt = 1</script><img src=x onerror=window.hurt=1>"
    shown = say(
        page,
        f"$x^2$ costs $5 or $6.\n\n$$\\frac{{1}}{{2}}\\text{{{hostile}}}$$\n\n\\[{hostile}\\]\n\n"
        f"```js\n'{hostile}'\n```\n\n${'{' * 10_000}$ ${'{' * 900}$\n\n"
        "$$\\href{javascript:x}{y}$$",
    )
    expect(shown.locator("p").first.locator("msup")).to_have_count(1)
    expect(shown.locator("mfrac")).to_have_count(1)
    expect(shown.locator("p").first).to_contain_text("costs $5 or $6.")
    expect(shown.locator("script, img, a")).to_have_count(0)
    expect(shown.locator(".code-string")).to_have_text(f"'{hostile}'", use_inner_text=False)
    tag = "e => e.namespaceURI + ' ' + getComputedStyle(e).display"
    assert shown.locator("mfrac").evaluate(tag) == "http://www.w3.org/1998/Math/MathML block math"
    assert page.evaluate("window.hurt") is None


def test_a_formula_grows_as_it_is_received(page: Any) -> None:
    text = "It is $a$, then\n\n$$\\frac{1}{2}$$ and $b$."
    chunks = [{"choices": [{"index": 0, "delta": {"content": letter}}]} for letter in text]
    answer_with(page, *chunks, "[DONE]")
    turn = ask(page, "17+25=")
    wait_for_answer(turn)
    expect(turn.locator(".answer math")).to_have_count(3)
    expect(turn.locator(".answer > p")).to_have_count(2)


def test_text_is_read_in_its_direction(page: Any) -> None:
    shown = say(page, "שלום עולם\n\nhello\n\n1. مرحبا\n\n```\nשלום\n```")
    direction = "e => getComputedStyle(e).direction"
    found = [one.evaluate(direction) for one in shown.locator(":scope > *").all()]
    assert found == ["rtl", "ltr", "rtl", "ltr"]


def test_a_second_tab_sees_what_is_new(page: Any) -> None:
    ask(page, "17+25=")
    other = page.context.new_page()
    other.goto(page.url)
    listed = other.locator("#conversation-list .choose")
    expect(listed).to_have_count(1)
    page.locator("#new").click()
    assert wait_for_answer(ask(page, "count from 3 to 5")) == "3 4 5"
    expect(listed).to_have_text(["count from 3 to 5", "17+25="])
    other.locator("#list-toggle").click()
    listed.first.click()
    expect(other.locator(".answer")).to_have_text("3 4 5")
    wait_for_answer(ask(page, "reverse: abc"))
    expect(other.locator(".answer")).to_have_text(["3 4 5", "cba"])
    page.on("dialog", lambda dialog: dialog.accept())
    page.locator("#list-toggle").click()
    page.get_by_role("button", name="Delete 17+25=").click()
    expect(listed).to_have_text(["count from 3 to 5"])
    assert wait_for_answer(ask(other, "17+25=")) == "42"
    expect(page.locator(".turn")).to_have_count(3)


def test_a_cut_answer_says_so(page: Any) -> None:
    never_end(page, 3000)
    turn = ask(page, "count from 3 to 200")
    expect(turn.locator(".answer")).to_contain_text("3 4")
    page.wait_for_function(
        """async () => {
          const opening = indexedDB.open("penstock");
          await new Promise((resolve) => { opening.onsuccess = resolve; });
          const store = opening.result.transaction("conversations").objectStore("conversations");
          const all = store.getAll();
          await new Promise((resolve) => { all.onsuccess = resolve; });
          opening.result.close();
          return all.result[0]?.turns[0].answer;
        }"""
    )
    page.reload()
    expect(page.locator(".note")).to_have_text(
        "not whole: the page was closed, or another tab receives it"
    )
    page.unroute_all()
    page.get_by_role("button", name="Try again").click()
    assert wait_for_answer(page.locator(".turn")).endswith("199 200")
    expect(page.locator(".note")).not_to_contain_text("not whole")


def test_folded_settings_name_what_is_set(page: Any) -> None:
    summary = page.locator("#settings summary")
    expect(summary).to_have_text("Settings")
    expect(page.locator("#temperature")).to_be_hidden()
    open_settings(page)
    page.locator("#temperature").fill("0.5")
    page.locator("#thinking").click()
    page.reload()
    expect(page.locator("#temperature")).to_be_hidden()
    expect(summary).to_have_text("Settings: temperature, no thinking")
