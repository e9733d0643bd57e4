"""Mutated frames of every union of the protocol: each is a message that can be used, or dropped.

`PENSTOCK_SEARCH=50 pytest tests/fuzz/test_decode.py` makes a million, spread over the unions.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, get_args

import msgspec
import pytest
import zmq
from msgspec import Struct

from penstock.protocol.checkpoint import max_request_bytes
from penstock.protocol.config import Config
from penstock.protocol.messages.client import GenerateRequest, Reply, codec_of
from penstock.protocol.messages.packed import pack, unpack
from penstock.protocol.messages.pipeline import (
    StepTokens,
    TextDeltas,
    TokenizedRequest,
    TokenizeRequest,
    ToTokenizer,
)
from penstock.protocol.messages.plan import BatchPlan, SampledTokens
from penstock.protocol.messages.supervisor import SupervisorHeartbeat
from penstock.protocol.messages.worker import GrammarCompiled
from penstock.protocol.tokenizer_file import read_generation_config
from penstock.protocol.transport.channel import DECODE_ERRORS, Channel
from penstock.services.detokenizer.process import Detokenizer
from penstock.services.detokenizer.text_stream import token_bytes
from penstock.services.gateway.admission import RefusedError, Validation, decode_request
from penstock.services.gateway.request import Client, Connection, GapError, Request, Share
from penstock.services.scheduler.blocks.block_manager import BlockManager
from penstock.services.scheduler.blocks.block_pool import BlockPool
from penstock.services.scheduler.scheduler import Scheduler
from penstock.services.scheduler.sequence import CannotFitError, Sequence
from penstock.services.tokenizer.chat_template import PromptError
from penstock.services.tokenizer.prompts import Tokenizer
from tests.fuzz.frames import INNER_ID, MESSAGES, UNIONS, encoded
from tests.fuzz.mutator import Mutator
from tests.search import scaled

CONFIG = Config(max_model_len=64)
TABLE = token_bytes(CONFIG.model_folder)
TOKENIZER = Tokenizer(CONFIG.model_folder, CONFIG.max_model_len)
GENERATION = read_generation_config(CONFIG.model_folder)
TO_TOKENIZER = msgspec.msgpack.Decoder(ToTokenizer)
VALIDATION = Validation(CONFIG)
TIMEOUT = 60_000
"""milliseconds that a frame may take"""
NUM_FRAMES = scaled(20_000) // len(UNIONS)
INNER_UNIONS = sorted(UNIONS.keys() - {"Request", "Reply"})


@pytest.fixture(params=[(zmq.PULL, zmq.PUSH), (zmq.ROUTER, zmq.DEALER)], ids=["PULL", "ROUTER"])
def sockets(request: pytest.FixtureRequest) -> "Iterator[list[zmq.Socket[bytes]]]":
    """Connect a socket that receives and one that sends."""
    with zmq.Context() as context, contextlib.ExitStack() as stack:
        receiver, sender = (stack.enter_context(context.socket(kind)) for kind in request.param)
        receiver.bind("inproc://frames")
        sender.connect("inproc://frames")
        yield [receiver, sender]


def test_every_union_has_an_example_of_each_message() -> None:
    assert {name: set(get_args(union) or [union]) for name, union in UNIONS.items()} == {
        name: set(map(type, messages)) for name, messages in MESSAGES.items()
    }


def use_tokens(message: StepTokens) -> None:
    deltas, stops = Detokenizer(TABLE).handle(message)
    pack(token_id for delta in deltas for token_id in delta.token_ids)
    assert len(stops) <= len(deltas)


def use_prompt(message: TokenizeRequest) -> None:
    unpack(message.request.output_token_ids)
    try:
        pack(TOKENIZER.encode(message)[0])
    except PromptError:
        return


def use_request(message: TokenizedRequest) -> None:
    """As the scheduler does: what it takes, it can plan."""
    blocks = BlockManager(BlockPool(8), 16)
    scheduler = Scheduler(CONFIG, CONFIG.max_model_len, blocks)
    sequence = Sequence(message, frozenset([256]))
    try:
        sequence.check(vocab_size=1 << 31)
        scheduler.add(sequence)
    except CannotFitError:
        return
    if grammars := scheduler.next_grammars():
        ((number, _),) = grammars.added
        assert not scheduler.on_compiled(GrammarCompiled(grammars.epoch, number))
    plan = scheduler.schedule()
    assert (plan is None) == (sequence.finish_reason is not None)


def use_accepted(accepted: Request) -> None:
    """As gateway and tokenizer do."""
    frame = msgspec.msgpack.encode(accepted.submission())
    sent = TO_TOKENIZER.decode(frame)
    assert msgspec.msgpack.encode(sent) == frame  # NaN, which a tool may hold, is equal to nothing
    use_prompt(sent)


def use_texts(message: TextDeltas) -> None:
    """Handle output as the gateway, which fails a request whose logprobs can not be decoded."""
    client = Client((b"c",), codec_of(b"{"), Connection(), Share(""))
    accepted = Request(GenerateRequest(prompt="a"), INNER_ID, client)
    try:
        for delta in message.deltas:
            accepted.append(delta)
    except (GapError, *DECODE_ERRORS):
        pass
    use_prompt(accepted.submission())
    accepted.client.codec.encode(accepted.reply("stop"))


def use_plan(message: BatchPlan) -> None:
    for row in message.added:
        unpack(row.token_ids), unpack(row.block_ids)
    unpack(message.removed), unpack(message.appended)
    assert len(unpack(message.chunks)) % 2 == 0


def use_heartbeat(message: SupervisorHeartbeat) -> None:
    """As the supervisor does, which kills by a descriptor."""
    with contextlib.suppress(ProcessLookupError):
        os.close(os.pidfd_open(message.pid))


USES: dict[type[Struct], Callable[[Any], None]] = {
    StepTokens: use_tokens,
    TokenizeRequest: use_prompt,
    TokenizedRequest: use_request,
    TextDeltas: use_texts,
    BatchPlan: use_plan,
    SupervisorHeartbeat: use_heartbeat,
    SampledTokens: lambda message: list(unpack(message.token_ids)),
}
"""what the receiver does with a message, where it relies on more than the types of the fields"""


@pytest.mark.search
@pytest.mark.parametrize("union", INNER_UNIONS)
def test_inner_frames(union: str, sockets: "list[zmq.Socket[bytes]]") -> None:
    receiver: Channel[Any] = Channel(sockets[0], UNIONS[union])
    num_messages = 0
    for frame in Mutator(union, encoded(union)).frames(NUM_FRAMES // 2):
        sockets[1].send(frame)
        assert receiver.socket.poll(TIMEOUT)
        for _, message in receiver.receive():
            num_messages += 1
            assert isinstance(message, UNIONS[union])
            USES.get(type(message), str)(message)
    assert receiver.num_bad_frames == NUM_FRAMES // 2 - num_messages
    assert 0.01 < num_messages / (NUM_FRAMES // 2) < 0.9


@pytest.mark.search
def test_requests() -> None:
    """Requests that are valid reach the tokenizer unchanged; a refusal can be sent."""
    num_accepted = 0
    for frame in Mutator("Request", encoded("Request")).frames(NUM_FRAMES):
        codec = codec_of(frame)
        try:
            request = decode_request(codec, frame, max_request_bytes(CONFIG))
            if isinstance(request, GenerateRequest):
                VALIDATION.check(request, is_req_socket=False)
                client = Client((b"c",), codec, Connection(), Share(""))
                use_accepted(Request(request, "r", client, generation=GENERATION))
            num_accepted += 1
        except RefusedError as refused:
            reply = codec.decode_reply(codec.encode(refused.reply))
            assert reply == refused.reply
            assert len(refused.reply.message) < 100_000
    assert 0.01 < num_accepted / NUM_FRAMES < 0.9


@pytest.mark.search
def test_replies() -> None:
    """Handle frames as a client: `Session.receive` drops undecodable frames."""
    num_messages = 0
    for frame in Mutator("Reply", encoded("Reply")).frames(NUM_FRAMES):
        try:
            message = codec_of(frame).decode_reply(frame)
        except DECODE_ERRORS:
            continue
        assert isinstance(message, Reply)
        num_messages += 1
    assert 0.01 < num_messages / NUM_FRAMES < 0.9
