"""Valid messages of every socket, to be mutated, and how many mutated frames a test makes."""

import os
from types import UnionType
from typing import Any

import msgspec
from msgspec import Struct

from penstock.protocol import client, messages
from penstock.protocol.client import (
    AbortReply,
    AbortRequest,
    ChatMessage,
    ErrorReply,
    GenerateReply,
    GenerateRequest,
    StatusRequest,
    TextDelta,
    Usage,
)
from penstock.protocol.messages import (
    GatewayStarted,
    Goodbye,
    Heartbeat,
    Pulse,
    Refused,
    ReleaseRequest,
    RequestFailed,
    StopFound,
    StreamOpened,
    TextDeltas,
    TokenDelta,
    Tokenized,
    TokenizedRequest,
    TokenizeRequest,
    WorkerAssignment,
    WorkerExit,
    WorkerHello,
)
from penstock.protocol.plan import BatchPlan, RowAdded, SampledTokens, pack
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.status import SchedulerStatus, StatusReply

INNER_ID = "inner"
"""no client's request has it"""
FAILED = RequestFailed(INNER_ID, 0, ErrorReply(code="invalid", message="no", field="prompt"))
PROMPT = list(b"17+25=")
CHAT = [ChatMessage(role="system", content="é🙂"), ChatMessage(role="user", content="17+25=")]
SAMPLING = SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=3, stop=["zz", "é"])
STATUS = SchedulerStatus(
    epoch=0, ready=True, num_free_blocks=7, workers=["w"], detokenizers={"d": 1}
)
DELTA = TextDelta(
    request_id=INNER_ID,
    token_offset=0,
    char_offset=0,
    token_ids=[52, 50],
    text="42",
    finish_reason="stop",
    prompt_tokens=6,
)
OPENED = StreamOpened(1, INNER_ID, 0, pack(PROMPT[-4:]), pack([52]), ["zz"], 6, 0, "length")
ROW = RowAdded(0, pack(PROMPT), pack([0]), 0, 1.0, 5, 0.9, 0.1, 3)

MESSAGES: dict[str, list[Struct]] = {
    "Request": [
        GenerateRequest(prompt="17+25=", max_tokens=4),
        GenerateRequest(prompt=PROMPT, request_id="outer", stream=True, stop="zz", seed=5),
        GenerateRequest(messages=CHAT, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1),
        GenerateRequest(prompt="2+2=", stop=["4", "é"], stop_token_ids=[1, 2], ignore_eos=True),
        AbortRequest(request_id="outer"),
        StatusRequest(wait=True),
        StatusRequest(fresh=True),
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
        AbortReply(request_id="r", found=True),
        ErrorReply(code="invalid", message="no", request_id="r", field="prompt"),
        StatusReply(
            ready=True,
            model="m",
            num_requests=1,
            tokenizers={"t": 1},
            scheduler=STATUS,
            num_bad_frames=0,
        ),
    ],
    "ToTokenizer": [
        TokenizeRequest(INNER_ID, 0, SAMPLING, prompt="17+25=", output_token_ids=[52]),
        TokenizeRequest(INNER_ID, 1, SamplingParams(), prompt=PROMPT),
        TokenizeRequest(INNER_ID, 2, SamplingParams(), messages=CHAT),
        Refused("no"),
    ],
    "FromTokenizer": [Heartbeat("fuzz"), Goodbye(), Tokenized(INNER_ID, 0), FAILED],
    "ToScheduler": [
        TokenizedRequest(INNER_ID, 0, SAMPLING, pack(PROMPT), pack([52])),
        TokenizedRequest(INNER_ID, 1, SamplingParams(max_tokens=4), pack(PROMPT)),
        ReleaseRequest(INNER_ID, 1),
        StopFound(INNER_ID, 0),
        GatewayStarted(0),
    ],
    "ToDetokenizer": [
        TokenDelta(1, [OPENED], pack([1, 1]), pack([52, 50]), [(1, "stop")], [2]),
        Refused("no"),
    ],
    "FromDetokenizer": [Heartbeat("fuzz"), Goodbye()],
    "ToWorker": [
        WorkerAssignment(1, "g", 0, 1, "tcp://127.0.0.1:1"),
        WorkerExit("no"),
        BatchPlan(1, 2, pack([3]), [ROW], pack([4]), pack([0, 6])),
    ],
    "FromWorker": [
        WorkerHello("fuzz", "g", 0, 100, 16, (1.0, 2.0)),
        WorkerHello("fuzz"),
        SampledTokens(1, 2, pack([52, 50])),
    ],
    "ToGateway": [TextDeltas([DELTA, DELTA]), FAILED, STATUS],
    "Pulse": [Pulse("fuzz", 2**31 - 1, 1.0, "g")],
}
"""an example of each message of every union, by the union's name"""

UNIONS: dict[str, Any] = {"Pulse": Pulse} | {
    name: union
    for module in (client, messages)
    for name, union in vars(module).items()
    if isinstance(union, UnionType)
}
"""every union of the protocol by its name, and the one message that has a socket of its own"""


def encoded(union: str) -> list[bytes]:
    """The examples as frames; what clients say and hear comes in JSON, too."""
    frames = [msgspec.msgpack.encode(message) for message in MESSAGES[union]]
    if union in ("Request", "Reply"):
        frames += [msgspec.json.encode(message) for message in MESSAGES[union]]
    return frames


def num_frames(default: int) -> int:
    """`PENSTOCK_FRAMES`, or few."""
    return int(os.environ.get("PENSTOCK_FRAMES", default))
