"""Prompts, conversations and token ids become token ids, or a sentence says why not."""

import errno
import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers.processors import TemplateProcessing

from penstock.protocol.config import Config
from penstock.protocol.messages.client import (
    ChatMessage,
    DetokenizeReply,
    DetokenizeRequest,
    TokenizePromptRequest,
    TokenizeReply,
)
from penstock.protocol.messages.pipeline import (
    FromTokenizer,
    RequestFailed,
    TokenizeDone,
    TokenizedRequest,
    TokenizeRequest,
    TokenizerQuery,
    ToScheduler,
)
from penstock.protocol.messages.sampling import Pooling, SamplingParams
from penstock.protocol.messages.structured import StructuredOutputs
from penstock.protocol.transport.context import Context, Endpoints
from penstock.services.tokenizer import child, grammar_check, process
from penstock.services.tokenizer.chat_template import DEFECT, PromptError
from penstock.services.tokenizer.process import TokenizerProcess
from penstock.services.tokenizer.prompts import Tokenizer

DEMO = Config().model_folder
TOKENIZER = Tokenizer(DEMO, max_model_len=64)
END = TOKENIZER.backend.token_to_id("<|endoftext|>")


def request(
    request_id: str = "r",
    sampling: SamplingParams | None = None,
    pooling: Pooling | None = None,
    **fields: Any,
) -> TokenizeRequest:
    own = TokenizedRequest(request_id, 0, sampling or SamplingParams(), pooling=pooling)
    return TokenizeRequest(own, **fields)


def encode(asked: TokenizeRequest) -> list[int]:
    return TOKENIZER.encode(asked)[0]


@pytest.mark.parametrize(("side", "kept"), [("left", [7, 8]), ("right", [5, 6])])
def test_a_long_prompt_is_cut_where_that_is_wanted(side: str, kept: list[int]) -> None:
    cut = {"truncate_prompt_tokens": 2, "truncation_side": side}
    assert encode(request(prompt=[5, 6, 7, 8], **cut)) == kept
    assert encode(request(prompt=[5], **cut)) == [5]
    assert len(encode(request(prompt="a" * 100, truncate_prompt_tokens=63))) == 63
    assert len(encode(request(prompt="a", truncate_prompt_tokens=9))) == 1


def adding(folder: Path, template: str) -> Tokenizer:
    """Return the tokenizer with special tokens before or after each text, `A` in a template."""
    made = HuggingFaceTokenizer.from_file(str(DEMO / "tokenizer.json"))
    tokens = [("<|endoftext|>", END)]
    made.post_processor = TemplateProcessing(template, special_tokens=tokens)
    made.save(str(folder / "tokenizer.json"))
    shutil.copy(DEMO / "tokenizer_config.json", folder)
    return Tokenizer(folder, max_model_len=64)


def test_special_tokens_are_added_to_prompts_only_unless_given(tmp_path: Path) -> None:
    tokenizer = adding(tmp_path, "<|endoftext|> $A")

    def first(**fields: Any) -> int:
        return tokenizer.encode(request(**fields))[0][0]

    messages = [ChatMessage(role="user", content="hi")]
    assert first(prompt="a") == first(messages=messages, add_special_tokens=True) == END
    assert first(prompt="a", add_special_tokens=False) == ord("a")
    assert first(messages=messages) != END


@pytest.mark.parametrize(("side", "kept"), [("left", "hi"), ("right", "gh")])
def test_a_text_is_cut_before_the_tokens_that_the_tokenizer_adds(
    tmp_path: Path, side: str, kept: str
) -> None:
    """Texts keep the added tokens, as in transformers; token ids are cut without them."""
    tokenizer = adding(tmp_path, "$A <|endoftext|>")
    cut = {"truncate_prompt_tokens": 3, "truncation_side": side}

    def encode(**fields: Any) -> list[int]:
        return tokenizer.encode(request(pooling=Pooling(), **fields))[0]

    text = "ghi" if side == "left" else "ghx"
    assert encode(prompt=text, **cut) == [*map(ord, kept), END]
    assert encode(prompt=text)[-1] == END
    assert len(encode(prompt=[5, 6, 7, 8], **cut)) == 3
    assert encode(prompt="gh", add_special_tokens=False, **cut) == [103, 104]
    assert len(encode(prompt=text, truncate_prompt_tokens=1)) == 1


@pytest.mark.parametrize(("pooling", "most"), [(None, 63), (Pooling(), 64)])
def test_the_context_limit_and_one_more(pooling: Pooling | None, most: int) -> None:
    """A prompt without an answer may fill the context."""
    assert len(encode(request(prompt="x" * most, pooling=pooling))) == most
    sentence = rf"prompt: got {most + 1} tokens, expected up to {most}.* in the context of 64"
    with pytest.raises(PromptError, match=sentence) as caught:
        encode(request(prompt="x" * (most + 1), pooling=pooling))
    assert (caught.value.field, caught.value.too_long) == ("prompt", (most + 1, most))


def test_messages_go_through_the_chat_template() -> None:
    """With the template's own arguments; it knows no tools and leaves them out."""
    messages = [ChatMessage(role="user", content="hi")]
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert encode(request(messages=messages)) == encode(request(prompt=text))
    asked = request(
        messages=messages,
        tools=[{"type": "function", "function": {"name": "f"}}],
        chat_template_kwargs={"enable_thinking": False},
    )
    silent = request(prompt=text + "<think>\n\n</think>\n\n")
    assert encode(asked) == encode(silent)


class Pipeline:
    """A tokenizer process with its gateway and scheduler."""

    def __init__(self, folder: Path, context: Context) -> None:
        at = Endpoints(*(f"ipc://{folder}/{name}" for name in Endpoints._fields))
        self.gateway = context.bind(zmq.ROUTER, at.tokenizers, FromTokenizer)
        self.scheduler = context.bind(zmq.PULL, at.requests, ToScheduler)
        own = SimpleNamespace(
            config=Config(),
            context=context,
            endpoints=at,
            all_endpoints=[at],
            name="tokenizer.1",
            identity=b"t",
        )
        self.process = TokenizerProcess(own)  # type: ignore[arg-type]
        self.answers: list[Any] = []

    def ask(self, request_id: str, **wanted: Any) -> None:
        sampling = SamplingParams(structured_outputs=StructuredOutputs(**wanted))
        self.process.handle(request(request_id, sampling, prompt="né"))

    def wait_for(self, num_answers: int) -> list[Any]:
        """Run the process's loop until the gateway has `num_answers`."""
        self.process.loop.add(self.gateway, lambda: self._receive(num_answers))
        self.process.loop.run()
        return self.answers

    def _receive(self, num_answers: int) -> None:
        answers = (message for _, message in self.gateway.receive())
        self.answers += [m for m in answers if isinstance(m, TokenizeDone | RequestFailed)]
        if len(self.answers) >= num_answers:
            self.process.loop.stop()


@pytest.fixture
def pipeline(tmp_path: Path) -> Iterator[Pipeline]:
    with Context() as context:
        made = Pipeline(tmp_path, context)
        yield made
        context.destroy(linger=0)


def test_the_gateway_is_told_how_long_a_prompt_is(pipeline: Pipeline) -> None:
    pipeline.process.handle(request(prompt="née"))
    assert pipeline.wait_for(1) == [TokenizeDone("r", 0, 4)]
    pipeline.scheduler.socket.poll(60_000)
    ((_, passed_on),) = pipeline.scheduler.receive()
    assert passed_on.request_id == "r"


@pytest.mark.parametrize("grammar", [None, StructuredOutputs(regex="a")])
def test_the_scheduler_gets_bad_words_as_tokens(
    pipeline: Pipeline, grammar: StructuredOutputs | None
) -> None:
    sampling = SamplingParams(bad_words=["ab", "c"], structured_outputs=grammar)
    pipeline.process.handle(request("r", sampling, prompt="x"))
    assert pipeline.wait_for(1) == [TokenizeDone("r", 0, 1)]
    pipeline.scheduler.socket.poll(60_000)
    ((_, passed_on),) = pipeline.scheduler.receive()
    assert passed_on.bad_words == [[97, 98], [99]]


def test_a_grammar_that_compiles(pipeline: Pipeline) -> None:
    """The second time it is known, and the answer there at once."""
    pipeline.ask("r", json_object=True)
    assert pipeline.wait_for(1) == [TokenizeDone("r", 0, 3)]
    reasons: list[str] = []
    pipeline.process.grammars.check(
        StructuredOutputs(json_object=True).to_llguidance(), "", reasons.append
    )
    assert reasons == [""]


SLOW: dict[str, Any] = {
    "json": {"allOf": [{"type": "string", "pattern": f".*a.{{{i}}}b"} for i in range(15)]}
}
"""two minutes within llguidance's limits"""
DEEP: dict[str, Any] = {
    "grammar": "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(4000)) + 'r4000: "x"'
}
"""overflows the stack"""


@pytest.mark.parametrize(
    "schema",
    [
        '{"multipleOf": NaN}',
        '{"multipleOf": -Infinity}',
        '{"multipleOf": 1e999}',
        r'{"\ud800": 1234567890123456789}',
        '{"minimum": NaN, "maximum": 1234567890123456789}',
        '{"const": 12345678901234567890123}',
    ],
)
def test_schemas_in_grammars_may_be_no_json(schema: str) -> None:
    """The compiler refuses them; nothing before it fails at them."""
    given = StructuredOutputs(grammar=f"start: %json {schema}").to_llguidance()
    matcher = LLMatcher(LLTokenizer(str(DEMO / "tokenizer.json")), given, log_level=0)
    assert grammar_check.excess(given) or matcher.is_error()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ({"json": {"uniqueItems": True}}, 'Unimplemented keys: ["uniqueItems"]'),
        ({"json": {"type": "integer", "minimum": 3, "maximum": 2}}, "Unsatisfiable schema"),
        ({"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "no text matches"),
        ({"regex": "(?=a)"}, "look-ahead"),
        ({"regex": "(a{1000}){1000}"}, "its repetitions expand to too many states"),
        ({"regex": "b{20}(a{1000}){1000}"}, "its repetitions expand to too many states"),
        ({"grammar": "start: <|nothing|>"}, "unknown special token"),
        (SLOW, "compiling it takes more than 2.0 s, which is the limit"),
        (DEEP, "it is nested too deep to be compiled"),
    ],
)
def test_a_grammar_that_does_not_compile(
    pipeline: Pipeline, wanted: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if wanted is not SLOW:  # a slow machine may need half a second for others
        monkeypatch.setattr(grammar_check, "MAX_COMPILE_SECONDS", 60)
    pipeline.ask("r", **wanted)
    (failed,) = pipeline.wait_for(1)
    assert (failed.error.code, failed.error.field) == ("invalid", "structured_outputs")
    assert failed.error.message.startswith("structured_outputs: got one that can't be compiled (")
    assert reason in failed.error.message
    assert "\n" not in failed.error.message, "the grammar, which the client has not written"
    assert not pipeline.scheduler.socket.poll(0)


def test_a_defect_of_the_compiler_refuses_its_grammar(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(grammar_check, "_failure", lambda *_: 1 // 0)
    pipeline.ask("r", regex="a")
    (failed,) = pipeline.wait_for(1)
    assert "(the compiler fails at it)" in failed.error.message
    assert "the compiler of grammars ended with exit code 1" in caplog.text


def test_grammars_wait_in_turn_while_no_child_can_be_forked(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The limit of processes is reached; other requests are served meanwhile."""
    fork, num_open = os.fork, len(list(Path("/proc/self/fd").iterdir()))
    failures = iter(range(3))

    def fork_at_last() -> int:
        if next(failures, None) is None:
            return fork()
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "fork", fork_at_last)
    monkeypatch.setattr(grammar_check, "RETRY_SECONDS", 0.0)
    pipeline.ask("a", regex="a")
    pipeline.ask("b", regex="b")
    assert len(list(Path("/proc/self/fd").iterdir())) == num_open, "failed children leave no pipe"
    pipeline.process.handle(request(prompt="x"))
    answers = pipeline.wait_for(3)
    assert answers[0] == TokenizeDone("r", 0, 1)
    assert sorted(answer.request_id for answer in answers) == ["a", "b", "r"]
    assert all(isinstance(answer, TokenizeDone) for answer in answers)
    assert "no grammar can be checked: [Errno 11]" in caplog.text


@pytest.mark.slow
def test_slow_grammars_delay_no_other_request(pipeline: Pipeline) -> None:
    """Equal ones are compiled once."""
    for number in range(3):
        pipeline.ask(f"slow{number}", **SLOW)
    pipeline.process.handle(request(prompt="x"))
    answers = pipeline.wait_for(4)
    assert answers[0] == TokenizeDone("r", 0, 1)
    assert {answer.request_id for answer in answers[1:]} == {f"slow{number}" for number in range(3)}


def test_clients_take_turns_with_their_grammars(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grammar of one client does not wait for those of another, which are refused."""
    started: list[str] = []

    def start_child(work: Any, *limits: Any) -> tuple[int, int]:
        started.append(work.args[1])
        return child.start_child(work, *limits)

    monkeypatch.setattr(grammar_check, "start_child", start_child)
    checker, ends = pipeline.process.grammars, []
    grammars = {
        name: StructuredOutputs(json={"type": "string", "pattern": f"{name}(?=a)"}).to_llguidance()
        for name in ("many0", "many1", "many2", "single")
    }

    def on_checked(name: str, reason: str) -> None:
        assert reason
        ends.append(name)
        if len(ends) == len(grammars):
            pipeline.process.loop.stop()

    for name, grammar in grammars.items():
        checker.check(grammar, name.rstrip("012"), partial(on_checked, name))
    assert started == [grammars["many0"], grammars["single"]]
    pipeline.process.loop.run()
    assert sorted(started) == sorted(grammars.values())
    again: list[str] = []
    checker.check(grammars["many0"], "other", again.append)
    assert "look-ahead" in again[0], "the verdict is remembered with its reason"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"json": {"patternProperties": {f"a{n}": {} for n in range(200)}}}, ""),
        ({"json": {"patternProperties": {f"a{n}": {} for n in range(202)}}}, "20301 pairs"),
        ({"json": {"items": {"multipleOf": 0.25}}}, ""),
        ({"json": {"items": [{"multipleOf": 1e5}, {"multipleOf": 0.01}]}}, "got 100001 in total"),
        ({"grammar": 'start: "x" %json {"multipleOf": 1e300}'}, "multipleOf"),
        ({"grammar": "start: %json {"}, ""),
        (
            {"grammar": 'start: %json {"minimum": 9007199254740993}'},
            "minimum: got 9007199254740993",
        ),
    ],
)
def test_a_grammar_that_is_not_compiled(fields: dict[str, Any], reason: str) -> None:
    """A grammar is refused that would take long, whatever the load, or round integers."""
    found = grammar_check.excess(StructuredOutputs(**fields).to_llguidance())
    assert reason in found
    assert bool(reason) == bool(found)


@pytest.mark.parametrize(
    ("place", "name"), [(StructuredOutputs, "to_llguidance"), (process, "excess")]
)
def test_a_defect_at_a_grammar_refuses_its_request_alone(
    pipeline: Pipeline,
    place: Any,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    prepare = getattr(place, name)

    def fail(given: Any) -> str:
        if "hostile" in str(given):
            raise ZeroDivisionError("a defect")
        return str(prepare(given))

    monkeypatch.setattr(place, name, fail)
    pipeline.ask("hostile", regex="hostile")
    pipeline.ask("good", regex="good")
    failed, done = pipeline.wait_for(2)
    assert (failed.request_id, failed.error.code) == ("hostile", "failed")
    assert failed.error.message == DEFECT
    assert isinstance(done, TokenizeDone)
    (record,) = caplog.records
    assert record.exc_info and record.exc_info[0] is ZeroDivisionError


def test_queries(pipeline: Pipeline) -> None:
    """A prompt may be longer than the context; special tokens have a text."""

    def answer(query: TokenizePromptRequest | DetokenizeRequest) -> Any:
        answered = pipeline.process.answer(TokenizerQuery(7, query))
        assert answered.number == 7
        return answered.reply

    long = TokenizeReply(token_ids=[97] * 5000, max_model_len=4096)
    assert answer(TokenizePromptRequest(prompt="a" * 5000)) == long
    messages = [ChatMessage(role="user", content="hi")]
    token_ids = answer(TokenizePromptRequest(messages=messages)).token_ids
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert answer(DetokenizeRequest(token_ids=token_ids)) == DetokenizeReply(text=text)
    named = answer(TokenizePromptRequest(prompt="a b", return_token_strs=True))
    assert named.token_strs == ["a", "Ġ", "b"]
    assert answer(TokenizePromptRequest(prompt="a")).token_strs is None
    kwargs = {"tokenize": False}
    refused = answer(TokenizePromptRequest(messages=messages, chat_template_kwargs=kwargs))
    assert (refused.code, refused.field) == ("invalid", "chat_template_kwargs")


def test_a_defect_fails_its_prompt_alone(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = Tokenizer._encode

    def fail(self: Tokenizer, prompt: Any) -> list[int]:
        if prompt.prompt == "bad":
            raise KeyError("a defect")
        return encode(self, prompt)

    monkeypatch.setattr(Tokenizer, "_encode", fail)
    pipeline.process.handle(request("bad", prompt="bad"))
    pipeline.process.handle(request("good", prompt="good"))
    failed, done = pipeline.wait_for(2)
    assert (failed.request_id, failed.error.code) == ("bad", "failed")
    assert isinstance(done, TokenizeDone)
    answered = pipeline.process.answer(TokenizerQuery(7, TokenizePromptRequest(prompt="bad")))
    assert answered.reply.code == "failed"  # type: ignore[union-attr]
