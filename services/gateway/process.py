"""The gateway's process: sockets around the ledger."""

import signal
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import zmq

from penstock.protocol.checkpoint import read_generation_config, read_model_config
from penstock.protocol.client import (
    AbortReply,
    AbortRequest,
    ErrorReply,
    FinishReason,
    GenerateRequest,
    Reply,
    Request,
    SchedulerStatus,
    StatusReply,
    StatusRequest,
    TextDelta,
    codec_of,
)
from penstock.protocol.messages import (
    FromTokenizer,
    Goodbye,
    Heartbeat,
    Refused,
    ReleaseRequest,
    RequestFailed,
    TextDeltas,
    ToGateway,
    Tokenized,
    refusal,
)
from penstock.protocol.peers import Peers
from penstock.protocol.process import Process
from penstock.protocol.sockets import Channel, bind, connect
from penstock.services.gateway.admission import Admission, RefusedError, decode_request
from penstock.services.gateway.authentication import bind_clients
from penstock.services.gateway.ledger import Client, Entry, GapError, Ledger


class Gateway:
    """Answers clients; gives requests to tokenizers; collects text from detokenizers."""

    def __init__(self, process: Process) -> None:
        self.log = process.log
        self.config = process.config
        self.generation = read_generation_config(self.config.model_folder)
        self.admission = Admission(self.config, read_model_config(self.config.model_folder))
        self.ledger = Ledger()
        self.tokenizers: Peers[Entry] = Peers()
        self.unassigned: dict[str, Entry] = {}
        """requests that wait for a tokenizer to come"""
        self.scheduler: SchedulerStatus | None = None
        self.waiting_for_ready: list[Client] = []
        self.waiting_for_report: list[Client] = []
        self.was_ready = self.draining = False
        context, at = process.context, process.endpoints
        self.clients, authentication = bind_clients(context, self.config)
        self.to_tokenizers = bind(context, zmq.ROUTER, at.tokenizers, FromTokenizer)
        self.results = bind(context, zmq.PULL, at.results, ToGateway)
        self.to_scheduler = connect(context, zmq.PUSH, at.requests)
        self.handlers: list[tuple[Channel[Any], Callable[[], None]]] = [
            (self.results, self.on_results),
            (self.to_tokenizers, self.on_tokenizers),
            (self.clients, self.on_clients),
            *authentication,
        ]

    def pump(self) -> bool:
        """Handles what waits; True if something did, and more may. A ZeroMQ file descriptor signals
        changes, not states, and a send may swallow the change: so until it is False, go on."""
        busy = False
        for channel, handler in self.handlers:
            if channel.socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:  # type: ignore
                handler()
                busy = True
        if self.draining and not self.ledger:
            signal.raise_signal(signal.SIGTERM)
        return busy

    def drain(self) -> None:
        """Lets nothing in any more; `pump` ends the process when nothing is open."""
        self.draining = True

    # ---- clients -----------------------------------------------------------------------------

    def on_clients(self) -> None:
        """Requests; whatever is wrong with one is told to its sender alone."""
        for frames in self.clients.receive_frames():
            client = Client(tuple(frames[:-1]), codec_of(frames[-1]))
            try:
                request = decode_request(client.codec, frames[-1], self.config.max_request_bytes)
                self.on_request(client, request)
            except RefusedError as error:
                self.answer(client, error.reply)

    def on_request(self, client: Client, request: Request) -> None:
        """One good frame. Raises RefusedError."""
        match request:
            case GenerateRequest():
                self.accept(client, request)
            case AbortRequest():
                found = self.abort(request.request_id)
                self.answer(client, AbortReply(request_id=request.request_id, found=found))
            case StatusRequest():
                if request.wait and (request.fresh or not self.ready):
                    self.waiting_for_ready.append(client)
                elif request.fresh:
                    self.waiting_for_report.append(client)
                else:
                    self.answer(client, self.status())

    def accept(self, client: Client, request: GenerateRequest) -> None:
        """Writes a request into the ledger and sends it on its way. Raises RefusedError."""
        if self.draining:
            raise RefusedError("the pipeline stops and takes no more requests", code="overloaded")
        request_id = request.request_id or uuid4().hex
        if request_id in self.ledger:
            raise RefusedError(f"request_id {request_id!r} is open already", "request_id")
        self.admission.check(request, len(self.ledger), is_req_socket=client.envelope[-1] == b"")
        entry = Entry(request, request_id, client)
        self.generation.fill(entry.sampling)
        self.ledger.add(entry)
        self.submit(entry)

    def abort(self, request_id: str) -> bool:
        """Ends a request with what it has; False if it is not open."""
        if entry := self.ledger.get(request_id):
            self.finish(entry, "abort")
        return entry is not None

    def answer(self, client: Client, reply: Reply) -> bool:
        """False if the client is gone."""
        return self.clients.send_frames([*client.envelope, client.codec.encode(reply)])

    def finish(self, entry: Entry, reason: FinishReason) -> None:
        """Answers a request with all its text."""
        self.close(entry)
        self.answer(entry.client, entry.reply(reason))

    def fail(self, entry: Entry, error: ErrorReply) -> None:
        """Answers a request with an error."""
        self.close(entry)
        error.request_id = entry.request_id
        self.answer(entry.client, error)

    def close(self, entry: Entry) -> None:
        """Takes a request off the ledger and frees what the scheduler holds for it."""
        self.ledger.close(entry.request_id)
        self.unassigned.pop(entry.request_id, None)
        self.to_scheduler.send(ReleaseRequest(entry.request_id))

    # ---- tokenizers --------------------------------------------------------------------------

    def submit(self, entry: Entry) -> None:
        """Gives a request to the tokenizer that has the fewest."""
        while tokenizer := self.tokenizers.least_loaded():
            tokenizer.work[entry.request_id] = entry
            if self.to_tokenizers.send(entry.submission(), tokenizer.identity):
                return
            del tokenizer.work[entry.request_id]
            self.lose_tokenizer(tokenizer.identity)
        self.unassigned[entry.request_id] = entry

    def on_tokenizers(self) -> None:
        """Requests that are with the scheduler now, refused prompts, heartbeats."""
        for identity, message in self.to_tokenizers.receive():
            match message:
                case Heartbeat():
                    self.on_heartbeat_of(identity, message)
                case Goodbye():
                    self.lose_tokenizer(identity)
                case Tokenized() | RequestFailed():
                    if tokenizer := self.tokenizers.get(identity):
                        tokenizer.work.pop(message.request_id, None)
                    self.on_tokenized(message)

    def on_heartbeat_of(self, identity: bytes, message: Heartbeat) -> None:
        """Registers a new tokenizer, or refuses it."""
        if reason := refusal(message):
            self.log.warning("refused: %s", reason)
            self.to_tokenizers.send(Refused(reason), identity)
        elif self.tokenizers.alive(identity, message.name):
            self.submit_unassigned()

    def on_tokenized(self, message: Tokenized | RequestFailed) -> None:
        """A tokenizer is done with a request."""
        entry = self.ledger.get(message.request_id)
        if entry is None:  # ended meanwhile: the scheduler must not go on with it
            self.to_scheduler.send(ReleaseRequest(message.request_id))
        elif isinstance(message, RequestFailed):
            self.fail(entry, message.error)

    def lose_tokenizer(self, identity: bytes) -> None:
        """Its unanswered requests go to another one, or to the next that comes."""
        for entry in self.tokenizers.lost(identity):
            if entry.request_id in self.ledger:
                self.unassigned[entry.request_id] = entry
        self.submit_unassigned()

    def submit_unassigned(self) -> None:
        """There may be a tokenizer now."""
        entries, self.unassigned = self.unassigned, {}
        for entry in entries.values():
            self.submit(entry)
        self.tell_ready()

    # ---- results -----------------------------------------------------------------------------

    def on_results(self) -> None:
        """Text from detokenizers; failures and news from the scheduler."""
        for _, message in self.results.receive():
            match message:
                case TextDeltas(deltas):
                    for delta in deltas:
                        self.on_delta(delta)
                case RequestFailed():
                    entry = self.ledger.get(message.request_id)
                    if entry and entry.attempt == message.attempt:
                        self.fail(entry, message.error)
                case SchedulerStatus():
                    self.on_scheduler(message)

    def on_delta(self, delta: TextDelta) -> None:
        """Passes new text on; a request nobody knows any more is released."""
        entry = self.ledger.get(delta.request_id)
        if entry is None:
            self.to_scheduler.send(ReleaseRequest(delta.request_id))
            return
        try:
            new = entry.append(delta)
        except GapError as error:
            self.log.warning("%s: %s; it begins again there", delta.request_id, error)
            entry.attempt += 1
            self.submit(entry)
            return
        if new is not None:
            self.stream(entry, new)
            if delta.finish_reason:
                self.finish(entry, delta.finish_reason)

    def stream(self, entry: Entry, delta: TextDelta) -> None:
        """A client that is gone ends its request."""
        wanted = entry.request.stream and (delta.token_ids or delta.text)
        if wanted and not self.answer(entry.client, delta):
            self.close(entry)

    def on_scheduler(self, status: SchedulerStatus) -> None:
        """A new epoch is a new scheduler, which knows nothing: the ledger is submitted again."""
        if self.scheduler and status.epoch < self.scheduler.epoch:
            return
        is_new = self.scheduler is not None and status.epoch > self.scheduler.epoch
        self.scheduler = status
        if is_new:
            entries = self.ledger.begin_again()
            self.log.warning("the scheduler was restarted: %d requests go on", len(entries))
            for entry in entries:
                self.submit(entry)
        self.tell_ready()
        clients, self.waiting_for_report = self.waiting_for_report, []
        for client in clients:
            self.answer(client, self.status())

    # ---- status ------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Every stage is there."""
        return bool(self.scheduler and self.scheduler.ready and len(self.tokenizers))

    def tell_ready(self) -> None:
        """Answers those who wait for it, when it becomes so."""
        was_ready, self.was_ready = self.was_ready, self.ready
        if self.ready and not was_ready:
            clients, self.waiting_for_ready = self.waiting_for_ready, []
            for client in clients:
                self.answer(client, self.status())

    def status(self) -> StatusReply:
        """The pipeline as seen from here."""
        return StatusReply(
            ready=self.ready,
            model=str(self.config.model_folder),
            num_requests=len(self.ledger),
            tokenizers={peer.name: len(peer.work) for peer in self.tokenizers},
            scheduler=self.scheduler,
            num_bad_frames=sum(channel.num_bad_frames for channel, _ in self.handlers),
        )

    def on_heartbeat(self) -> None:
        """Gives up tokenizers that are silent."""
        for identity in self.tokenizers.silent():
            self.lose_tokenizer(identity)
