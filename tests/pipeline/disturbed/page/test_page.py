"""The page in headless Chromium, in front of a real pipeline."""

import os
import re
import signal
from typing import Any

import psutil
import pytest

from tests.pipeline.conftest import Pipeline
from tests.pipeline.disturbed.page.browser import (
    Pages,
    answer_with,
    ask,
    expect,
    never_end,
    open_settings,
    pid_of,
    process_box,
    wait_for_answer,
)
from tests.pipeline.http_api import KEY

pytestmark = pytest.mark.pipeline


def test_asks_and_shows_the_answer_as_it_comes(page: Any) -> None:
    first = ask(page, "count from 3 to 200")
    expect(first.locator(".answer")).to_contain_text("3 4")
    expect(first).to_have_attribute("aria-busy", "true")
    assert wait_for_answer(first) == " ".join(map(str, range(3, 201)))
    expect(first.locator(".note")).to_contain_text("tokens/s")
    turn = ask(page, "17+25=")
    assert wait_for_answer(turn) == "42"
    expect(turn.locator(".note")).to_have_text(
        re.compile("^3 tokens · first text after [0-9]+ ms$")
    )
    page.locator("#new").click()
    expect(page.locator(".turn")).to_have_count(0)


def test_stops_and_asks_again(page: Any) -> None:
    never_end(page, 3000)
    turn = ask(page, "count from 3 to 9")
    expect(turn.locator(".answer")).to_contain_text("3 4")
    page.keyboard.press("Escape")
    wait_for_answer(turn)
    expect(turn.locator(".note")).to_have_text("stopped")
    # the pipeline has stopped too
    expect(process_box(page, "gateway.1").locator(".load")).to_contain_text("0 requests")
    expect(page.locator("#running")).to_have_text("0")
    page.unroute("**/v1/chat/completions")
    page.locator("#new").click()
    assert wait_for_answer(ask(page, "17+25=")) == "42"


def test_shows_a_killed_detokenizer_and_the_answer_goes_on(site: Pipeline, page: Any) -> None:
    never_end(page, 1000)
    restarts = site.restarts()
    undisturbed = wait_for_answer(ask(page, "count from 3 to 9"))
    page.locator("#new").click()
    busy = page.locator('.process[data-name^="detokenizer"]', has_text=re.compile("[1-9] request"))
    turn = ask(page, "count from 3 to 9")
    expect(turn.locator(".answer")).to_contain_text("3 4")
    with site.suspended("worker.1"):  # the answer can't end before the page shows who is busy
        expect(busy).to_have_count(1)
        name = busy.get_attribute("data-name")
        pid = pid_of(page, name)
        assert turn.get_attribute("aria-busy") == "true"
        os.kill(pid, signal.SIGKILL)
    box = process_box(page, name)
    expect(box.locator(".restarts")).to_have_text(f"restarted {restarts[name] + 1}×")
    expect(page.locator("#events")).to_contain_text(f"{name} was restarted: pid {pid} is now")
    expect(box).to_have_attribute("data-state", "running")
    assert pid_of(page, name) != pid
    assert wait_for_answer(turn) == undisturbed


def test_a_broken_stream_is_shown_and_asked_again(site: Pipeline, pages: Pages, page: Any) -> None:
    never_end(page, 3000)
    restarts = site.restarts()["http.1"]
    turn = ask(page, "count from 3 to 9")
    expect(turn.locator(".answer")).to_contain_text("3 4")
    site.kill("http.1")
    expect(turn.locator(".failure")).to_have_text("The connection to the server broke.")
    expect(page.locator("#state")).to_have_text("ready")
    shown = process_box(page, "http.1").locator(".restarts")
    expect(shown).to_have_text(f"restarted {restarts + 1}×")
    page.unroute("**/v1/chat/completions")
    turn.get_by_role("button", name="Try again").click()
    assert wait_for_answer(turn) == "3 4 5 6 7 8 9"
    assert any("net::ERR" in error for error in pages.errors)
    pages.errors.clear()


@pytest.mark.parametrize(
    ("last", "sentence"),
    [
        ({"choices": []}, "The stream broke off before its end."),
        ({"error": {"message": "It failed."}}, "It failed."),
    ],
)
def test_a_stream_without_an_end_is_a_failure(page: Any, last: object, sentence: str) -> None:
    answer_with(page, {"choices": [{"index": 0, "delta": {"content": "4"}}]}, last)
    turn = ask(page, "17+25=")
    expect(turn.locator(".failure")).to_have_text(sentence)
    assert wait_for_answer(turn) == "4"


def test_shows_why_a_request_was_refused(pages: Pages, page: Any) -> None:
    open_settings(page)
    page.locator("#max-tokens").fill("9999999")
    turn = ask(page, "17+25=")
    expect(turn.locator(".failure")).to_contain_text("9999999")
    expect(page.locator("#totals")).not_to_contain_text("refused")  # of everybody
    page.locator("#max-tokens").fill("")
    page.locator("#new").click()
    assert wait_for_answer(ask(page, "17+25=")) == "42"
    expect(page.locator(".failure")).to_be_hidden()
    page.reload()
    page.locator("#list-toggle").click()
    page.locator("#conversation-list .choose").nth(1).click()
    turn = page.locator(".turn")
    expect(turn.locator(".failure")).to_contain_text("9999999")
    turn.get_by_role("button", name="Try again").click()
    assert wait_for_answer(turn) == "42"
    assert any("400" in error for error in pages.errors)
    pages.errors.clear()


def test_asks_for_the_api_key(pages: Pages) -> None:
    page = pages.open(has_key=False)
    for key in ("wrong", KEY):
        page.get_by_label("Key", exact=True).fill(key)
        page.keyboard.press("Enter")
        if key == "wrong":
            expect(page.locator("#key-reason")).to_contain_text("did not accept")
    expect(page.locator("#state")).to_have_text("ready")
    assert wait_for_answer(ask(page, "17+25=")) == "42"
    assert any("401" in error for error in pages.errors)
    pages.errors.clear()


def test_keyboard_reaches_everything(page: Any) -> None:
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.type("17+25=")
    page.keyboard.press("Shift+Enter")
    expect(page.locator("#prompt")).to_have_value("17+25=\n")
    page.keyboard.press("Enter")
    assert wait_for_answer(page.locator(".turn")) == "42"
    for name in ("send", "new"):
        page.keyboard.press("Tab")
        expect(page.locator(f"#{name}")).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.locator("#settings summary")).to_be_focused()
    page.keyboard.press("Enter")
    for name in ("system", "tools", "temperature", "max-tokens", "thinking"):
        page.keyboard.press("Tab")
        expect(page.locator(f"#{name}")).to_be_focused()
        assert page.locator(f"#{name}").evaluate("e => getComputedStyle(e).outlineStyle") != "none"
    for _ in range(9):
        page.keyboard.press("Shift+Tab")
    for name in ("Regenerate", "Copy answer", "Edit"):
        expect(page.get_by_role("button", name=name, exact=True)).to_be_focused()
        page.keyboard.press("Shift+Tab")
    expect(page.locator("#log")).to_be_focused()
    page.keyboard.press("Shift+Tab")
    expect(page.locator("#theme")).to_be_focused()
    page.keyboard.press("Shift+Tab")
    expect(page.get_by_role("tab", name="Chat")).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Metrics")).to_be_focused()
    expect(page.get_by_role("tabpanel", name="Metrics")).to_be_visible()
    expect(page.locator("#chat")).to_be_hidden()


def test_everything_has_a_name(page: Any) -> None:
    """As Chromium reports it to a screen reader."""
    wait_for_answer(ask(page, "17+25="))
    open_settings(page)
    tree = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")
    roles = (
        "button",
        "checkbox",
        "heading",
        "image",
        "log",
        "meter",
        "spinbutton",
        "tab",
        "textbox",
    )
    named = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in tree["nodes"]
        if not node["ignored"] and node["role"]["value"] in roles
    ]
    assert {"button", "checkbox", "log", "meter", "spinbutton", "textbox"} <= {r for r, _ in named}
    assert not [role for role, name in named if not name]
    for label in ("Message", "System prompt", "Tools", "Temperature", "Max tokens", "Thinking"):
        expect(page.get_by_label(label, exact=True)).to_have_count(1)
    expect(page.locator("#log")).to_have_attribute("aria-live", "polite")


def test_light_and_dark(pages: Pages) -> None:
    background = "e => getComputedStyle(e).backgroundColor"
    colors = {}
    for scheme in ("light", "dark"):
        page = pages.open(color_scheme=scheme)
        colors[scheme] = page.locator("body").evaluate(background)
    assert colors["light"] != colors["dark"]
    for scheme in ("light", "dark"):  # the toggle, where the system says dark
        page.locator("#theme").click()
        assert page.locator("body").evaluate(background) == colors[scheme]


def test_reduced_motion(pages: Pages) -> None:
    page = pages.open(reduced_motion="reduce")
    expect(process_box(page, "gateway.1")).to_be_visible()
    moving = "() => document.getAnimations().length"
    assert page.evaluate(moving) == 0


def test_model_text_is_never_markup(page: Any) -> None:
    turn = ask(page, "repeat: <b>a</b> <img src=x>")
    assert wait_for_answer(turn) == "<b>a</b> <img src=x>"
    expect(page.locator("#log b, #log img")).to_have_count(0)


def test_folds_what_the_model_thinks(page: Any) -> None:
    """The demo model does not think: this stream is written down."""
    deltas: tuple[dict[str, str], ...] = (
        {"role": "assistant", "content": ""},
        {"reasoning_content": "6 times "},
        {"reasoning_content": "7"},
        {"content": "4"},
        {"content": "2"},
    )
    answer_with(page, *[{"choices": [{"index": 0, "delta": delta}]} for delta in deltas], "[DONE]")
    turn = ask(page, "6 times 7?")
    assert wait_for_answer(turn) == "42"
    thought = turn.locator(".thinking .text")
    expect(turn.locator("summary")).to_contain_text("Thought for")
    expect(thought).to_be_hidden()
    turn.locator("summary").focus()
    page.keyboard.press("Enter")
    expect(thought).to_have_text("6 times 7")


def test_code_stands_apart(page: Any) -> None:
    turn = ask(page, "repeat: so:\n```python\nx = 1\n```\nthat is all")
    wait_for_answer(turn)
    expect(turn.locator("pre")).to_have_text("x = 1")
    expect(turn.locator(".code .row span")).to_have_text("python")
    expect(turn.locator(".answer p")).to_have_text(["so:", "that is all"])
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    turn.get_by_role("button", name="Copy", exact=True).click()
    expect(turn.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == "x = 1"


def test_processes_are_the_pipelines(site: Pipeline, page: Any) -> None:
    processes = site.processes()
    expect(page.locator(".process")).to_have_count(len(processes))
    for name, pid in processes.items():
        assert pid_of(page, name) == pid
        assert psutil.pid_exists(pid)
