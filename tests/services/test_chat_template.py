"""Chat templates render as in transformers, and what they can't render is an error."""

import json
import resource
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import PreTrainedTokenizerFast

from penstock.protocol.checkpoint import ModelError
from penstock.protocol.config import Config
from penstock.protocol.messages.client import ChatMessage, PromptFields
from penstock.services.tokenizer import chat_template as module
from penstock.services.tokenizer.chat_template import ChatTemplate, PromptError

FOLDER = Config().model_folder
CALL = {"type": "function", "function": {"name": "add", "arguments": {"é": [1, 2], "<b>": None}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
MESSAGES = [
    ChatMessage(role="system", content="Be brief. <&>'"),
    ChatMessage(role="user", content="2 + 3?\n", name="Ann"),
    ChatMessage(
        role="assistant", content="", tool_calls=[CALL], reasoning_content="\nI must add.\n"
    ),
    ChatMessage(role="tool", content="5", tool_call_id="c1"),
    ChatMessage(role="assistant", content="<think>\nWell\n</think>\n\nIt is 5."),
    ChatMessage(role="user", content="<tool_response>6</tool_response>"),
]
TEMPLATES = {
    "of the demo model": None,
    "tools": """
{%- if tools %}
    {%- for tool in tools %}
        {{- loop.index0 ~ ": " ~ (tool | tojson) + "\\n" }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {% for call in message.tool_calls or [] %}
      {%- set call = call.function if call.function else call %}
{{ call.name }}({{ call.arguments if call.arguments is string else call.arguments | tojson }})
    {% endfor %}
[{{ message.role | upper }}{{ "/" + message.name if message.name is defined else "" }}]
{%- endfor %}""",
    "break, continue and macros": """
{%- macro show(message, tag="m") %}<{{ tag }}>{{ message.content | trim }}</{{ tag }}>{% endmacro %}
{%- for message in messages %}
    {%- if message.role == "system" %}{% continue %}{% endif %}
    {%- if message.role == "tool" %}{% break %}{% endif %}
    {{- show(message, tag=message.role) }}
{%- endfor %}
{% generation %}{% set inner = 1 %}kept{% endgeneration %}{{ inner is defined }}
{{ dict(a=1)["a"] }} {{ range(3) | list }} {{ {"b": 1, "a": "é"} | tojson(indent=2) }}""",
    "tokens and arguments": """{{ bos_token }}{{ eos_token }}{{ pad_token }}
{{- enable_thinking is defined and enable_thinking is false }}{{ documents }}
{{- strftime_now("%Y") }}{% if add_generation_prompt %}>>{% endif %}{{ unknown }}""",
}


def template(folder: Path, source: str | None) -> ChatTemplate:
    shutil.copy(FOLDER / "tokenizer_config.json", folder)
    if source is not None:
        (folder / "chat_template.jinja").write_text(source)
    return ChatTemplate(folder)


def render(
    made: ChatTemplate,
    messages: list[ChatMessage] = MESSAGES,
    tools: list[dict[str, Any]] | None = None,
    kwargs: dict[str, Any] | None = None,
    **fields: Any,
) -> str:
    return made.render(
        PromptFields(messages=messages, tools=tools, chat_template_kwargs=kwargs or {}, **fields)
    )


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False, "pad_token": "own"}])
@pytest.mark.parametrize("tools", [None, [TOOL, TOOL]])
@pytest.mark.parametrize("name", TEMPLATES)
def test_equals_transformers(
    tmp_path: Path, name: str, tools: list[dict[str, Any]] | None, kwargs: dict[str, Any]
) -> None:
    maps = [
        {"role": m.role, "content": m.content}
        | {f: v for f in ("name", "reasoning_content", "tool_calls") if (v := getattr(m, f))}
        for m in MESSAGES
    ]
    theirs = PreTrainedTokenizerFast.from_pretrained(FOLDER).apply_chat_template(
        maps,
        tools=tools,
        chat_template=TEMPLATES[name],
        tokenize=False,
        add_generation_prompt=True,
        **kwargs,
    )
    ours = render(template(tmp_path, TEMPLATES[name]), MESSAGES, tools, kwargs)
    assert ours == theirs
    assert ours


NAMED = {
    "default": "plain{{ tools is none }}",
    "tool_use": "of tools{{ tools | length }}",
    "rag": "of documents",
}


@pytest.mark.parametrize("tools", [None, [], [TOOL]])
@pytest.mark.parametrize(
    "names", [["default", "tool_use", "rag"], ["default", "rag"], ["tool_use"]]
)
@pytest.mark.parametrize("in_files", [True, False])
def test_named_templates_are_chosen_as_by_transformers(
    tmp_path: Path, names: list[str], tools: list[dict[str, Any]] | None, in_files: bool
) -> None:
    """`tool_use` is for requests with tools, `default` for all others."""
    theirs = PreTrainedTokenizerFast.from_pretrained(FOLDER)
    theirs.chat_template = {name: NAMED[name] for name in names}
    theirs.save_pretrained(tmp_path, save_jinja_files=in_files)
    assert (tmp_path / "additional_chat_templates").exists() == in_files
    made = ChatTemplate(tmp_path)
    if tools is None and "default" not in names:
        with pytest.raises(ValueError, match="multiple chat templates with no default"):
            theirs.get_chat_template(tools=tools)
        with pytest.raises(PromptError, match="no chat template but tool_use; give a prompt"):
            render(made)
        return
    again = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    expected = again.apply_chat_template(
        [{"role": "user", "content": "hm"}], tools=tools, tokenize=False
    )
    assert render(made, tools=tools) == expected


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('no system') }}", "no system"),
        ("{{ messages[0].a.b }}", "has no attribute"),
        ("{{ 'a' + 1 }}", "can only concatenate str"),
        ("{{ messages[0].content.__class__.__mro__ }}", "unsafe"),
        ("{% for m in messages %}{% set _ = messages.append(1) %}{% endfor %}", "unsafe"),
        ("{{ level * 1 / 0 }}", "division by zero"),
    ],
)
def test_what_a_template_refuses(tmp_path: Path, source: str, reason: str) -> None:
    with pytest.raises(PromptError, match="messages: the chat template refused them: ") as caught:
        render(template(tmp_path, source), kwargs={"level": 2})
    assert reason in str(caught.value)


def test_arguments_do_not_replace_the_requests_own(tmp_path: Path) -> None:
    made = template(tmp_path, "{{ messages | length }}{{ self is defined }}")
    assert render(made, kwargs={"self": 1}).startswith("6")
    with pytest.raises(PromptError, match="got messages, which it can't set") as caught:
        render(made, kwargs={"messages": []})
    assert caught.value.field == "chat_template_kwargs"


@pytest.mark.parametrize("content", ["2 + 3 =", "im_end", " so \n", "<think>\nhm"])
def test_a_final_message_is_continued(tmp_path: Path, content: str) -> None:
    """Cut at its end, wherever else its text stands; the template's `im_end` is after it."""
    messages = [MESSAGES[1], ChatMessage(role="assistant", content=content)]
    theirs = PreTrainedTokenizerFast.from_pretrained(FOLDER).apply_chat_template(
        msgspec.to_builtins(messages), tokenize=False, continue_final_message=True
    )
    ours = render(template(tmp_path, None), messages, continue_final_message=True)
    assert ours == theirs
    assert ours.endswith(content)
    assert messages[-1].content == content


def test_a_template_without_the_final_message(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="leaves out the final message") as caught:
        render(template(tmp_path, "{{ messages[0].content }}"), continue_final_message=True)
    assert caught.value.field == "continue_final_message"


def test_without_a_generation_prompt(tmp_path: Path) -> None:
    made = template(tmp_path, None)
    assert render(made) == render(made, add_generation_prompt=False) + "<|im_start|>assistant\n"
    assert render(made) == render(made, add_generation_prompt=True)


def test_a_template_of_the_request(tmp_path: Path) -> None:
    made = template(tmp_path, None)
    assert render(made, chat_template="{{ messages | length }}{{ x }}", kwargs={"x": 1}) == "61"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% if %}", "is not a Jinja template: "),
        ("{{ messages.__class__.__mro__ }}", "refuses the messages: .*unsafe"),
        ("{{ x.y.z }}", "refuses the messages: .*'x' is undefined"),
        ("{{ '\\ud800' }}", "refuses the messages: .*surrogates not allowed"),
        ("{{ raise_exception('\\ud800') }}", r"refuses the messages: .*\\ud800"),
        ("{{ 'a' * 10**9 }}", "takes more than"),  # Jinja computes it while it compiles, in C
        ("{{ 'a'.ljust(10**9) }}", "takes more than"),
    ],
)
def test_a_template_of_the_request_that_fails(
    tmp_path: Path, source: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The log tells once of those that are beyond the limits."""
    module._log_limits.cache_clear()
    made = template(tmp_path, None)
    for _ in range(2):
        with pytest.raises(PromptError, match=f"chat_template: got one that {reason}") as caught:
            render(made, chat_template=source)
        assert caught.value.field == "chat_template"
    assert len(caplog.messages) == (reason == "takes more than")
    assert render(made, chat_template="{{ messages[-1].role }}!") == f"{MESSAGES[-1].role}!"


def test_a_model_without_a_template(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="the model has no chat template"):
        render(ChatTemplate(tmp_path))


@pytest.mark.parametrize("config", [{"chat_template": "{% if %}"}, {"chat_template": [1]}, []])
def test_files_that_are_none(tmp_path: Path, config: object) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(
        ModelError, match=r"(the chat template of .*|tokenizer_config.json) can't be read"
    ):
        ChatTemplate(tmp_path)


def test_rendering_takes_no_more_than_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_OWN_BYTES", 64 << 20)
    source = "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}"
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(PromptError, match="took more than 64 MiB to render"):
        render(template(tmp_path, source + "{% endfor %}{{ ns.s }}"))
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    assert render(template(tmp_path, "{{ messages[0].role }}"), MESSAGES) == "system"


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in messages %}{{ (tools | tojson)[a % 9] }}"
        "{% endfor %}{% endfor %}",
    ],
)
def test_rendering_takes_no_more_than_its_time(
    tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_RENDER_SECONDS", 0.05)
    tools = [TOOL | {"description": "x" * 100_000}]
    one = template(tmp_path, source)
    with pytest.raises(PromptError, match=r"took more than 0\.05 s to render"):
        one.render(PromptFields(messages=MESSAGES, tools=tools))
    assert render(template(tmp_path, "{{ messages[0].role }}"), MESSAGES) == "system"


AGENT = (Path(__file__).parent / "chat_templates" / "agent.jinja").read_text()
ASKED = ChatMessage(role="user", content="2 + 3?")


def said(*messages: ChatMessage, source: str = AGENT, folder: Path, **kwargs: Any) -> str:
    return render(template(folder, source), list(messages), kwargs=kwargs)


def called(arguments: str) -> ChatMessage:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return ChatMessage(role="assistant", content="", tool_calls=[call])


def test_parts_are_joined_by_a_template_that_can(tmp_path: Path) -> None:
    """As with transformers; templates that only know texts get lines, as in vLLM."""
    message = ChatMessage(role="user", content=["a", "b"])
    assert "<|im_start|>user\nab<|im_end|>" in said(message, folder=tmp_path)
    joined = render(template(tmp_path, "{{ messages[0].content | trim }}"), [message])
    assert joined == "a\nb"
    answer = ChatMessage(role="assistant", content=["so", "5 "])
    made = template(tmp_path, AGENT)
    assert render(made, [ASKED, answer], continue_final_message=True).endswith("</think>\n\nso5 ")
    own = render(made, [message], chat_template="{{ messages[0].content }}")
    assert own == "a\nb"


def test_system_messages_of_agents(tmp_path: Path) -> None:
    """Codex sends instructions and a developer message; hooks send system messages later."""
    first = [ChatMessage(role="system", content="one"), ChatMessage(role="developer", content="2")]
    late = ChatMessage(role="system", content="hurry")
    joined = ChatMessage(role="system", content="one\n\n2")
    as_user = ChatMessage(role="user", content="hurry")
    text = said(*first, ASKED, late, folder=tmp_path)
    assert text == said(joined, ASKED, as_user, folder=tmp_path)
    before = render(template(tmp_path, AGENT), [*first, ASKED], add_generation_prompt=False)
    assert text.startswith(before)
    every = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
    unchanged = said(*first, late, folder=tmp_path, source=every)
    assert unchanged == "[system:one][system:2][system:hurry]"
    with pytest.raises(PromptError, match="refused them: no question"):
        said(*first, folder=tmp_path)


@pytest.mark.parametrize("arguments", ['{"a": "cut', "[1]", "5"])
def test_arguments_that_are_no_object(tmp_path: Path, arguments: str) -> None:
    """A call that `max_tokens` cut off comes back in every later request."""
    text = said(ASKED, called(arguments), folder=tmp_path)
    assert f"<function=f>\n<parameter=INVALID_JSON>\n{arguments}\n</parameter>\n" in text
    shown = "{{ messages[1].tool_calls[0].function.arguments }}"
    assert said(ASKED, called(arguments), folder=tmp_path, source=shown) == arguments


def test_arguments_that_messagepack_lacks(tmp_path: Path) -> None:
    text = said(ASKED, called('{"a": 100000000000000000000000000, "b": [1.5]}'), folder=tmp_path)
    assert "<parameter=a>\n100000000000000000000000000\n</parameter>\n" in text
    assert "<parameter=b>\n[1.5]\n</parameter>\n" in text
    assert "<function=f>\n</function>" in said(ASKED, called(""), folder=tmp_path)


@pytest.mark.parametrize(
    ("effort", "shown"),
    [("minimal", "low"), ("low", "low"), ("high", "xhigh"), ("xhigh", "xhigh"), ("max", "xhigh")],
)
def test_efforts(tmp_path: Path, effort: str, shown: str) -> None:
    """The nearest one that the template knows, preferably a higher one."""
    assert f"Effort: {shown}<" in said(ASKED, folder=tmp_path, reasoning_effort=effort)
    assert "Effort" not in said(ASKED, folder=tmp_path, reasoning_effort="medium")
    any_effort = said(
        ASKED, folder=tmp_path, source="{{ reasoning_effort }}", reasoning_effort=effort
    )
    assert any_effort == effort
    with pytest.raises(PromptError, match="unknown effort huge"):
        said(ASKED, folder=tmp_path, reasoning_effort="huge")


def test_defaults_of_variables(tmp_path: Path) -> None:
    template(tmp_path, AGENT)
    made = ChatTemplate(tmp_path, {"enable_thinking": False})
    assert render(made, [ASKED]).endswith("<think>\n\n</think>\n\n")
    assert render(made, [ASKED], kwargs={"enable_thinking": True}).endswith("<think>\n")
