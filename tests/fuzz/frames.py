"""Valid messages of every socket, to be mutated, and how many mutated frames a test makes."""

from types import UnionType
from typing import Any

import msgspec
from msgspec import Raw, Struct

from penstock.protocol.messages import client, worker
from penstock.protocol.messages import pipeline as detokenizer
from penstock.protocol.messages import pipeline as scheduler
from penstock.protocol.messages import pipeline as tokenizer
from penstock.protocol.messages.client import (
    MSGPACK,
    AbortReply,
    AbortRequest,
    ChatMessage,
    DetokenizeReply,
    DetokenizeRequest,
    ErrorReply,
    GenerateReply,
    GenerateRequest,
    Logprob,
    StatusRequest,
    TextDelta,
    TokenizePromptRequest,
    TokenizeReply,
    TokenLogprobs,
    Usage,
)
from penstock.protocol.messages.packed import PackedLogprobs, pack
from penstock.protocol.messages.pipeline import (
    Confirmed,
    GatewayStarted,
    Goodbye,
    Heartbeat,
    Refused,
    ReleaseRequest,
    RequestFailed,
    StepTokens,
    StopFound,
    StreamDelta,
    StreamOpened,
    TextDeltas,
    TokenizeDone,
    TokenizedRequest,
    TokenizeRequest,
    TokenizerQuery,
    TokenizerReply,
)
from penstock.protocol.messages.plan import BatchPlan, RowAdded, RowExtras, SampledTokens
from penstock.protocol.messages.sampling import Pooling, SamplingParams
from penstock.protocol.messages.status import ProcessStatus, SchedulerStatus, StatusReply
from penstock.protocol.messages.structured import StructuredOutputs
from penstock.protocol.messages.supervisor import (
    PoisonFound,
    ProcessesDied,
    SupervisorHeartbeat,
    SupervisorReport,
    SuspectsCleared,
    ToSupervisor,
)
from penstock.protocol.messages.worker import (
    CompileGrammars,
    CopyBlocks,
    FolderReport,
    FolderRequest,
    GrammarCompiled,
    WorkerAssignment,
    WorkerExit,
    WorkerState,
)

INNER_ID = "inner"
"""no client's request has it"""
FAILED = RequestFailed(INNER_ID, 0, ErrorReply(code="invalid", message="no", field="prompt"))
PROMPT = list(b"17+25=")
CHAT = [ChatMessage(role="system", content="é🙂"), ChatMessage(role="user", content="17+25=")]
SAMPLING = SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=3, stop=["zz", "é"])
EXTRA_SAMPLING = SamplingParams(
    presence_penalty=0.5,
    frequency_penalty=-0.5,
    repetition_penalty=1.2,
    logit_bias={52: 1.5},
    allowed_token_ids=[*range(48, 58), 258],
    bad_words=["42", "7"],
    min_tokens=2,
    max_tokens=4,
    logprobs=2,
    prompt_logprobs=1,
    structured_outputs=StructuredOutputs(regex="[0-9]+"),
)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
LOGPROBS = TokenLogprobs(
    token_id=52,
    logprob=-0.5,
    token="4",  # noqa: S106
    bytes=[52],
    rank=1,
    top=[Logprob(token_id=50, logprob=-1.0, token="2", bytes=[50], rank=1)],  # noqa: S106
)
PACKED = PackedLogprobs(pack([52, 50]), bytes(8))
PROCESS = ProcessStatus(
    name="http.1", pid=1, uptime=1.0, restarts=0, cpu_seconds=0.5, counters={"messages_sent": 1.0}
)
STATUS = SchedulerStatus(
    epoch=0, ready=True, num_free_blocks=7, workers=["w"], detokenizers={"d": 1}
)
ENCODED = Raw(MSGPACK.encode(LOGPROBS))
OUTPUT: dict[str, Any] = {
    "request_id": INNER_ID,
    "token_offset": 0,
    "char_offset": 0,
    "token_ids": [52, 50],
    "text": "42",
    "finish_reason": "stop",
    "logprobs": [LOGPROBS, None],
    "prompt_tokens": 6,
}
DELTA = TextDelta(prompt_logprobs=[None, LOGPROBS], **OUTPUT)
STREAM_DELTA = StreamDelta(prompt_logprobs=[ENCODED], prompt_offset=1, **OUTPUT)
OPENED = StreamOpened(
    stream_id=1,
    request_id=INNER_ID,
    attempt=0,
    prompt_tail=pack(PROMPT[-4:]),
    output_token_ids=pack([52]),
    stop=["zz"],
    logprobs=[PACKED],
    prompt_logprobs=[PACKED],
    prompt_tokens=6,
    finish_reason="length",
)
EXTRAS = RowExtras(
    num_prompt_tokens=6,
    logit_bias={52: 1.5},
    min_tokens=1,
    end_token_ids=[258],
    num_logprobs=2,
    structured_outputs=StructuredOutputs(json_object=True),
    allowed_token_ids=[*range(128)],
    bad_words=[[52, 50], [55]],
)
POOLED = StreamOpened(2, INNER_ID, 0, b"", b"", finish_reason="stop", pooled=bytes(8))
NUMBERS = {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "presence_penalty": 0.5}
ROW = RowAdded(0, pack(PROMPT), pack([0]), 0, NUMBERS, 3, EXTRAS)

CONTINUED = RowAdded(1, pack(PROMPT[2:]), pack([0]), 3, NUMBERS, num_skipped=2)

MESSAGES: dict[str, list[Struct]] = {
    "Request": [
        GenerateRequest(prompt="17+25=", max_tokens=4),
        GenerateRequest(prompt=PROMPT, request_id="outer", stream=True, stop="zz", seed=5),
        GenerateRequest(messages=CHAT, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1),
        GenerateRequest(prompt="2+2=", stop=["4", "é"], stop_token_ids=[1, 2], ignore_eos=True),
        GenerateRequest(
            messages=CHAT, tools=TOOLS, chat_template_kwargs={"enable_thinking": False}
        ),
        GenerateRequest(prompt="2+2=", logprobs=2, min_tokens=2, logit_bias={5: -1.0}),
        GenerateRequest(prompt="2+2=", structured_outputs=StructuredOutputs(choice=["4", "5"])),
        GenerateRequest(prompt="2+2=", pooling=Pooling(dimensions=8)),
        GenerateRequest(prompt="2+2=", pooling=Pooling(label_ids=[52, 53])),
        TokenizePromptRequest(prompt="17+25="),
        TokenizePromptRequest(messages=CHAT, tools=TOOLS),
        DetokenizeRequest(token_ids=[52, 258]),
        AbortRequest(request_id="outer"),
        StatusRequest(wait=True),
        StatusRequest(fresh=True, metrics=True),
    ],
    "Reply": [
        DELTA,
        GenerateReply(
            request_id="r",
            text="42",
            token_ids=[52, 50],
            finish_reason="stop",
            usage=Usage(prompt_tokens=6, cached_tokens=0, output_tokens=2),
        ),
        TokenizeReply(token_ids=PROMPT, max_model_len=32),
        DetokenizeReply(text="42"),
        AbortReply(request_id="r", found=True),
        ErrorReply(code="invalid", message="no", request_id="r", field="prompt"),
        StatusReply(
            ready=True,
            model="m",
            num_requests=1,
            tokenizers={"t": 1},
            schedulers=[STATUS],
            num_bad_frames=0,
            processes=[PROCESS],
        ),
    ],
    "ToTokenizer": [
        TokenizeRequest(
            TokenizedRequest(INNER_ID, 0, SAMPLING, output_token_ids=pack([52])), prompt="17+25="
        ),
        TokenizeRequest(TokenizedRequest(INNER_ID, 1, SamplingParams()), prompt=PROMPT),
        TokenizeRequest(TokenizedRequest(INNER_ID, 2, EXTRA_SAMPLING), messages=CHAT, tools=TOOLS),
        TokenizerQuery(1, TokenizePromptRequest(prompt="17+25=")),
        Refused("no"),
    ],
    "FromTokenizer": [
        Heartbeat("fuzz"),
        Goodbye(),
        TokenizeDone(INNER_ID, 0),
        FAILED,
        TokenizerReply(1, DetokenizeReply(text="42")),
    ],
    "ToScheduler": [
        TokenizedRequest(INNER_ID, 0, SAMPLING, pack(PROMPT), pack([52])),
        TokenizedRequest(INNER_ID, 1, SamplingParams(max_tokens=4), pack(PROMPT)),
        TokenizedRequest(INNER_ID, 2, EXTRA_SAMPLING, pack(PROMPT), bad_words=[[52, 50], [55]]),
        TokenizedRequest(INNER_ID, 3, SAMPLING, pack(PROMPT), pooling=Pooling(dimensions=8)),
        ReleaseRequest(INNER_ID, 1),
        StopFound(INNER_ID, 0),
        GatewayStarted(0),
    ],
    "ToDetokenizer": [
        StepTokens(1, [OPENED], pack([1, 1]), pack([52, 50]), [(1, "stop")], [2], [(1, PACKED)]),
        StepTokens(1, [POOLED]),
        Refused("no"),
    ],
    "FromDetokenizer": [Heartbeat("fuzz"), Goodbye(), Confirmed()],
    "ToWorker": [
        WorkerAssignment(1, "g", 0, 1, "tcp://127.0.0.1:1"),
        WorkerExit("no"),
        BatchPlan(1, 2, pack([3]), [ROW, CONTINUED], pack([4]), pack([0, 6])),
        CopyBlocks(1, pack([3, 0]), pack([4, -1])),
        FolderRequest(1, [b"hash"], pack([0]), [b"other"], True),
        CompileGrammars(1, [(1, StructuredOutputs(regex="[0-9]+"))], [2]),
    ],
    "FromWorker": [
        WorkerState("fuzz", "g", 0, 100, 16, (1.0, 2.0)),
        WorkerState("fuzz"),
        SampledTokens(1, 2, pack([52, 50]), [(1, PACKED)], [(0, [PACKED])], [(0, "no")]),
        SampledTokens(1, 2, pack([52, 50]), pooled=[(0, bytes(8))]),
        FolderReport(1, 0, [b"hash"], [b"other"], [b"hash"], [b"hash"]),
        GrammarCompiled(1, 1, 4096, "no"),
    ],
    "ToGateway": [
        TextDeltas([STREAM_DELTA, STREAM_DELTA]),
        FAILED,
        STATUS,
        SupervisorReport([PROCESS]),
    ],
    "ToSupervisor": [
        SupervisorHeartbeat("fuzz", 2**31 - 1, 1.0, "g", 2, {"messages_sent": 1.0}),
        ProcessesDied([("fuzz", 7)], [b"digest"]),
        PoisonFound(b"digest"),
        SuspectsCleared([b"digest"]),
    ],
}
"""an example of each message of every union, by the union's name"""

UNIONS: dict[str, Any] = {"ToSupervisor": ToSupervisor} | {
    name: union
    for module in (client, detokenizer, scheduler, tokenizer, worker)
    for name, union in vars(module).items()
    if isinstance(union, UnionType)
}
"""every union of the protocol by its name, and the one message that has a socket of its own"""


def encoded(union: str) -> list[bytes]:
    """Return the examples as frames; what clients say and hear comes in JSON, too."""
    frames = [msgspec.msgpack.encode(message) for message in MESSAGES[union]]
    if union in ("Request", "Reply"):
        frames += [msgspec.json.encode(message) for message in MESSAGES[union]]
    return frames
