"""`LLM` with its own real pipeline."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from penstock import LLM, BeamSearchParams, SamplingParams, StructuredOutputs
from penstock.launch.offline.llm import Prompt
from penstock.launch.pipeline.errors import LaunchError
from penstock.protocol.client.client import Client
from penstock.protocol.client.session import RequestError
from penstock.protocol.config import run_folder
from tests.pipeline.conftest import START_TIMEOUT, STOP_TIMEOUT

pytestmark = pytest.mark.pipeline
SMALL = {"device": "cpu", "num_threads": 1, "kv_cache_gib": 0.1}
PROGRAM = f"""
import sys
from concurrent.futures import ThreadPoolExecutor
from penstock import LLM, SamplingParams
with ThreadPoolExecutor() as thread:  # that ends before the program
    llm = thread.submit(lambda: LLM(log_format="json", **{SMALL})).result()
print(llm.config.name, llm.config.endpoint, flush=True)
if sys.stdin.readline() == "":
    sys.exit("over")
llm.generate(["count from 0 to 999"] * 8, SamplingParams(max_tokens=3000, ignore_eos=True))
"""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """So small that most prompts must wait in the client."""
    with LLM(max_num_seqs=4, max_waiting_requests=2, enforce_eager=True, **SMALL) as one:
        yield one


def test_options_go_by_the_names_of_vllm_too(llm: LLM) -> None:
    assert (llm.config.enable_cuda_graphs, llm.config.max_num_seqs, llm.config.tp) == (False, 4, 1)


def test_the_same_tokens_as_from_the_server(llm: LLM) -> None:
    prompts = ["17+25=", "count from 3 to 9", "reverse: penstock", "repeat: ab"]
    params = [
        SamplingParams(max_tokens=30),
        SamplingParams(max_tokens=30, temperature=0.0),
        SamplingParams(max_tokens=30, temperature=1.5, seed=7),
        SamplingParams(max_tokens=5, ignore_eos=True, stop=["zz"]),
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    with Client(llm.config.endpoint, timeout=START_TIMEOUT) as client:
        for prompt, one, output in zip(prompts, params, outputs, strict=True):
            fields = {field: getattr(one, field) for field in one.__struct_fields__}
            reply = client.generate(prompt, **fields)
            (answer,) = output.outputs
            assert (answer.token_ids, answer.text) == (reply.token_ids, reply.text)
            assert answer.finish_reason == reply.finish_reason
            assert output.prompt == prompt
            assert output.prompt_token_ids == client.tokenize(prompt).token_ids
    assert [output.outputs[0].text for output in outputs[:2]] == ["42", "3 4 5 6 7 8 9"]


def test_results_come_in_order_though_few_are_open(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = llm.generate([f"{number}+1=" for number in range(40)])
    assert [output.outputs[0].text for output in outputs] == [str(n + 1) for n in range(40)]
    ids = [int(output.request_id) for output in outputs]
    assert ids == list(range(ids[0], ids[0] + 40))
    assert "40/40" in (shown := capsys.readouterr().err)
    assert "decode" in shown


def test_prompts_of_every_kind(llm: LLM) -> None:
    token_ids = llm.generate("17+25=", use_tqdm=False)[0].prompt_token_ids
    maps: list[Prompt] = [{"prompt": "17+25="}, {"prompt_token_ids": token_ids}]
    for prompts in (token_ids, [token_ids], ["17+25=", token_ids], maps, *maps):
        for output in llm.generate(prompts, use_tqdm=False):
            assert output.prompt_token_ids == token_ids
            assert output.outputs[0].text == "42"
            assert output.prompt in (None, "17+25=")
    assert llm.generate([]) == []


def test_outputs_say_why_they_end_and_how_long_they_took(llm: LLM) -> None:
    params = [
        SamplingParams(max_tokens=30, stop=["6 ", "9"]),
        SamplingParams(max_tokens=30, stop_token_ids=[ord("5")], logprobs=0),
        SamplingParams(max_tokens=30),
        SamplingParams(max_tokens=3),
    ]
    outputs = llm.generate(["count from 3 to 9"] * 4, params, use_tqdm=False)
    answers = [output.outputs[0] for output in outputs]
    assert [one.finish_reason for one in answers] == ["stop", "stop", "stop", "length"]
    assert [one.stop_reason for one in answers] == ["6 ", ord("5"), None, None]
    assert (answers[0].cumulative_logprob, answers[1].cumulative_logprob) == (None, 0.0)
    for output in outputs:
        assert output.finished
        metrics = output.metrics
        assert metrics is not None
        assert metrics.queued_ts < metrics.scheduled_ts < metrics.first_token_ts
        assert metrics.first_token_ts <= metrics.last_token_ts
        assert metrics.first_token_latency > metrics.first_token_ts - metrics.queued_ts


def test_n_answers_have_seeds_of_their_own(llm: LLM) -> None:
    def tokens(**fields: int) -> list[list[int]]:
        params = SamplingParams(temperature=2.0, max_tokens=12, ignore_eos=True, **fields)
        (output,) = llm.generate([10, 11, 12], params, use_tqdm=False)
        assert [answer.index for answer in output.outputs] == list(range(fields["n"]))
        return [answer.token_ids for answer in output.outputs]

    several = tokens(n=3, seed=5)
    assert len(set(map(tuple, several))) == 3
    assert several == [*tokens(n=1, seed=5), *tokens(n=1, seed=6), *tokens(n=1, seed=7)]


def test_chat(llm: LLM) -> None:
    first = [{"role": "user", "content": "17+25="}]
    second = [{"role": "system", "content": "Count."}, {"role": "user", "content": "1+1="}]
    (one,) = llm.chat(first, use_tqdm=False)
    assert (one.prompt, one.outputs[0].text) == (None, "42")
    both = llm.chat([first, second], SamplingParams(max_tokens=9), use_tqdm=False)
    assert [output.outputs[0].text for output in both] == ["42", "2"]
    (other,) = llm.chat(first, chat_template_kwargs={"enable_thinking": False}, use_tqdm=False)
    assert other.prompt_token_ids != one.prompt_token_ids


def test_what_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="temperature: got 3"):
        llm.generate(["1+1=", "2+2="], SamplingParams(temperature=3.0), use_tqdm=False)
    with pytest.raises(RequestError, match=r"stop\[0\]: got None, expected `str`$"):
        llm.generate("1+1=", SamplingParams(stop=[None]), use_tqdm=False)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="sampling_params: got 1, "):
        llm.generate(["1+1=", "2+2="], [SamplingParams()], use_tqdm=False)
    for n in (0, 129, "4"):
        with pytest.raises(RequestError, match=f"n: got {n!r}, expected `int`"):
            llm.generate("1+1=", SamplingParams(n=n), use_tqdm=False)  # type: ignore[arg-type]
    assert llm.generate("1+1=", use_tqdm=False)[0].outputs[0].text == "2"


def test_options_that_can_not_be() -> None:
    with pytest.raises(TypeError, match="LLM has no option 'swap_space'"):
        LLM(swap_space=4)
    with pytest.raises(LaunchError, match="--dtype: got float16 on a CPU"):
        LLM(dtype="float16", device="cpu")
    with pytest.raises(ValueError, match="max_num_seqs: got 0, expected `int` >= 1"):
        LLM(max_num_seqs=0)
    with pytest.raises(LaunchError, match="model: got '/none', expected an existing folder"):
        LLM("/none")


def test_logprobs_and_structured_outputs(llm: LLM) -> None:
    params = SamplingParams(logprobs=2, prompt_logprobs=1, max_tokens=4)
    (output,) = llm.generate("17+25=", params, use_tqdm=False)
    assert output.outputs[0].logprobs is not None
    for token_id, position in zip(
        output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True
    ):
        assert position is not None
        assert position[token_id].logprob == max(one.logprob for one in position.values())
        assert len(position) == 2
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    params = SamplingParams(structured_outputs=StructuredOutputs(choice=["yes", "no"]))
    assert llm.generate("17+25=", params, use_tqdm=False)[0].outputs[0].text in ("yes", "no")


@pytest.mark.parametrize(
    "how",
    [
        "SIGINT",
        *(pytest.param(one, marks=pytest.mark.long) for one in ("SIGKILL", "end of the program")),
    ],
)
def test_nothing_is_left_behind(how: str) -> None:
    """The program neither closes its LLM nor handles the interrupt."""
    number = getattr(signal, how, None)
    program = subprocess.Popen(
        [sys.executable, "-P", "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with program:
        assert program.stdin and program.stdout
        name, endpoint = program.stdout.readline().split()
        processes = psutil.Process(program.pid).children(recursive=True)
        assert len(processes) >= 6
        if number:
            print(file=program.stdin, flush=True)
            with Client(endpoint, timeout=START_TIMEOUT) as client:
                while not ((its := client.status(fresh=True).scheduler) and its.num_running):
                    pass
            program.send_signal(number)
            assert program.wait(STOP_TIMEOUT) == -number
        else:
            program.stdin.close()
            assert program.wait(STOP_TIMEOUT) == 1
    _, alive = psutil.wait_procs(processes, timeout=STOP_TIMEOUT)
    assert not alive
    assert not run_folder(name).exists()
    assert not Path(endpoint.removeprefix("ipc://")).exists()


def test_beam_search(llm: LLM) -> None:
    """The logprobs are those that the tokens have as a prompt."""
    prompts = ["17+25=", list(b"count from 3 to 5")]
    outputs = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=8))
    greedy = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    for output, one in zip(outputs, greedy, strict=True):
        best, *others = output.sequences
        assert len(others) == 2
        assert best.finish_reason == "stop"
        assert best.tokens == [*one.prompt_token_ids, *one.outputs[0].token_ids[:-1]]
        assert best.text.endswith(one.outputs[0].text)
        assert best.stop_reason == one.outputs[0].token_ids[-1]
        for found in output.sequences:
            again, *_ = llm.generate(
                found.tokens, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False
            )
            assert again.prompt_logprobs is not None
            start = len(one.prompt_token_ids)
            of_output = zip(found.tokens[start:], again.prompt_logprobs[start:], strict=True)
            values = [position[token].logprob for token, position in of_output if position]
            of_beam = zip(found.tokens[start:], found.logprobs, strict=True)
            assert values == pytest.approx(
                [position[token].logprob for token, position in of_beam if position], abs=1e-3
            )
