"""The clients' socket, which receives requests and sends replies."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from time import monotonic

import zmq

from penstock.protocol.checkpoint import max_request_bytes
from penstock.protocol.fair_queue import SEPARATOR
from penstock.protocol.messages.client import (
    BATCH,
    MSGPACK,
    ErrorReply,
    Reply,
    ReplyBatch,
    TextDelta,
    codec_of,
    has_number,
    reply_frames,
)
from penstock.protocol.transport.channel import OVERSIZE_SLACK
from penstock.protocol.transport.context import check_reach
from penstock.protocol.transport.process import Process
from penstock.services.gateway.connections import (
    ClientWatch,
    Connections,
    bind_clients,
    take_progress,
    update_num_read,
)
from penstock.services.gateway.ledger import Ledger
from penstock.services.gateway.request import Client, Connection, Request

log = logging.getLogger("gateway")
MAX_FRAMES = 8  # frames of a message, including the sender's identity
MAX_ENVELOPE_BYTES = 1024  # total size of the frames before the request
# minimum overhead of a frame on the wire, in addition to its content
FRAME_BYTES, CURVE_FRAME_BYTES = 2, 35
# seconds between attempts to send to a full queue: each attempt encodes a reply
RETRY_INTERVAL = 0.01
ENVELOPE = (
    f"a message has more than {MAX_FRAMES} frames, or {MAX_ENVELOPE_BYTES} bytes before the request"
)


class ClientSocket:
    """The clients' socket, which delivers the ledger's output no faster than a client reads.

    While a connection's queue is full, its output stays in the ledger. The output is sent, as one
    delta per request, with the next output for that connection or at the next heartbeat.
    """

    def __init__(
        self, process: Process, ledger: Ledger, on_defect: Callable[[Request], None]
    ) -> None:
        """Bind. `on_defect` fails requests in `except` blocks. Raises as `check_reach`, `bind`."""
        config = process.config
        check_reach(config)
        address = "inproc://clients-monitor"  # connect it first: else libzmq blocks
        self.connections = Connections(process.context.connect(zmq.PAIR, address))
        max_frame_bytes = max_request_bytes(config) + OVERSIZE_SLACK
        self.channel, self.connections.inner = bind_clients(process, address, max_frame_bytes)
        self._has_keys = bool(config.curve_keys)
        self._frame_overhead = CURVE_FRAME_BYTES if config.curve_keys else FRAME_BYTES
        self.max_unread_bytes = config.max_unread_bytes
        self.ledger = ledger
        self._watch = ClientWatch(config, max_frame_bytes)
        self._on_defect = on_defect
        # requests whose output `deliver_pending` sends, by id
        self._pending: OrderedDict[str, Request] = OrderedDict()

    def receive(self) -> Iterator[tuple[Client, bytes]]:
        """Yield waiting messages, undecoded. Disconnect clients that exceed a limit."""
        for frames in self.channel.receive_frames(max_frames=MAX_FRAMES):
            if self.connections.monitor.has_message or self.connections.refused:
                self.connections.handle_events()
            if connection := self._connection_of(frames[0]):
                if len(frames) > MAX_FRAMES or sum(map(len, frames[:-1])) > MAX_ENVELOPE_BYTES:
                    self.connections.cut_off(connection, ENVELOPE)
                    continue
                *envelope, data = (frame.bytes for frame in frames)
                share = connection.share
                turn = f"{share.name}{SEPARATOR}{connection.number}"
                yield Client(tuple(envelope), codec_of(data), connection, share, turn), data

    def reply(self, client: Client, reply: Reply) -> None:
        self.send(client, client.codec.encode(reply))

    def send(self, client: Client, reply: bytes) -> None:
        """Send an encoded reply, unless the client has disconnected."""
        connection = client.connection
        if connection.is_closed:
            return
        frames = reply_frames(client.envelope, reply)
        if connection.is_full or self._try_send(connection, frames) == zmq.EAGAIN:
            connection.replies.append(frames)

    def adopt(self, request: Request, client: Client) -> None:
        """Deliver a request's output, from its start, to the client that sent the request last."""
        request_id, previous = request.request_id, request.client
        previous.connection.unsent.pop(request_id, None)
        if previous.connection is not client.connection:
            message = f"request {request_id!r} is answered on another connection now"
            self.reply(previous, ErrorReply(code="failed", message=message, request_id=request_id))
        request.client = client
        request.rewind()
        self.deliver(request)

    def deliver(self, request: Request) -> None:
        """Mark a request's new output as pending, for `deliver_pending`."""
        self._pending[request.request_id] = request

    def deliver_pending(self) -> None:
        """Send pending output. A request leaves the ledger when its answer is sent."""
        while self._pending:  # an encoding error makes an error reply pending
            batches: dict[Connection, list[Request]] = {}
            while self._pending:
                _, request = self._pending.popitem(last=False)
                connection = request.client.connection
                if connection.is_closed:
                    continue
                if connection.is_full:
                    connection.unsent[request.request_id] = None
                    if monotonic() >= connection.retry_at:
                        self._flush(connection)
                elif connection.is_inner and has_number(request.client.envelope):
                    batches.setdefault(connection, []).append(request)
                else:
                    self._send_new(request)
            for connection, requests in batches.items():
                self._send_batch(connection, requests)

    def _send_batch(self, connection: Connection, requests: list[Request]) -> None:
        """Send the replies to the requests of one HTTP server in one message."""
        try:
            batch = [(request, reply) for request in requests for reply in request.unsent_replies()]
            numbers = [request.client.envelope[1] for request, _ in batch]
            frame = MSGPACK.encode(ReplyBatch(numbers, [reply for _, reply in batch]))
        except Exception:  # noqa: BLE001  an encoding error, which `_send_new` reports
            for request in requests:
                self._send_new(request)
            return
        error = self._try_send(connection, [connection.identity, BATCH + frame])
        for request, reply in batch:
            self._on_sent(request, reply, error)

    def release(self, request: Request) -> None:
        """Remove a request whose answer was sent, or can't be sent."""
        self._pending.pop(request.request_id, None)
        request.client.connection.unsent.pop(request.request_id, None)
        self.ledger.remove(request)

    def _flush(self, connection: Connection) -> None:
        """Send unsent output and replies until the queue is full again."""
        for request_id in list(connection.unsent):
            request = self.ledger.find(request_id)
            if request and not self._send_new(request):
                return
            connection.unsent.pop(request_id, None)
        while connection.replies:
            if self._try_send(connection, connection.replies[0]) == zmq.EAGAIN:
                return
            connection.replies.popleft()

    def cut_off_bad_clients(self) -> None:
        """Disconnect the clients that `ClientWatch.bad_clients` yields."""
        waits, shortest = self.channel.has_message, self.connections.take_shortest_identity()
        for connection, reason in self._watch.bad_clients(self.connections, waits, shortest):
            self.connections.cut_off(connection, reason)

    def retry_full(self) -> list[Connection]:
        """Retry full queues. Return connections with too many unread bytes.

        Connections of our HTTP servers are never returned: HTTP servers drop their own clients.
        """
        full = [connection for connection in self.connections if connection.is_full]
        for connection in full:
            update_num_read(connection)
            self._flush(connection)
        return [each for each in full if not each.is_inner and self._leaves_too_much(each)]

    def num_unread_bytes(self, connection: Connection) -> int:
        """Return the number of bytes that wait for a connection, here and in libzmq's queue."""
        requests = map(self.ledger.find, connection.unsent)
        num_bytes = sum(len(frame) for frames in connection.replies for frame in frames)
        num_bytes += sum(request.num_unread_bytes for request in requests if request)
        return connection.num_queued + num_bytes

    def _leaves_too_much(self, connection: Connection) -> bool:
        num_unread = self.num_unread_bytes(connection) - connection.largest
        return take_progress(connection) < self.max_unread_bytes < num_unread

    def _send_new(self, request: Request) -> bool:
        """Send all new output of a request, or fail it. Return False if the queue is full."""
        client = request.client
        try:
            encoded = [(reply, client.codec.encode(reply)) for reply in request.unsent_replies()]
        except Exception:  # noqa: BLE001
            self._on_defect(request)
            return True
        for reply, frame in encoded:
            frames = reply_frames(client.envelope, frame)
            if error := self._on_sent(request, reply, self._try_send(client.connection, frames)):
                return error != zmq.EAGAIN
        return True

    def _on_sent(self, request: Request, reply: Reply, error: int) -> int:
        """Record the result of sending a reply. Return `error`, an errno or 0."""
        if error == zmq.EAGAIN:
            request.client.connection.unsent[request.request_id] = None
        elif error:  # the client is unreachable, whatever the monitor says
            request.client = request.client._replace(connection=Connection(is_closed=True))
        elif isinstance(reply, TextDelta):
            request.mark_delivered()
        else:
            self.release(request)
        return error

    def _try_send(self, connection: Connection, frames: list[bytes]) -> int:
        """Send as `Channel.try_send` does. Return EAGAIN also if too many bytes are unread."""
        error = 0
        if connection.num_queued > self.max_unread_bytes:
            update_num_read(connection)
            if connection.num_queued > self.max_unread_bytes:
                error = zmq.EAGAIN
        error = error or self.channel.try_send(frames)
        if not error:
            num_bytes = len(frames[-1]) + self._frame_overhead * (len(frames) - 1)
            connection.num_queued += num_bytes
            connection.largest = max(connection.largest, num_bytes)
        elif error == zmq.EAGAIN:
            connection.retry_at = monotonic() + RETRY_INTERVAL
        return error

    def _connection_of(self, frame: zmq.Frame) -> Connection | None:
        """Return the connection of a message's first frame; None if the message must be dropped."""
        try:
            fd, identity = int(frame.get(zmq.SRCFD)), frame.bytes
        except zmq.ZMQError:  # libzmq knows the descriptor for ZMTP 3 only
            self.channel.count_bad_frame("its sender speaks ZMTP before version 3")
            return None
        connection = self.connections.by_fd.get(fd)
        if connection is None or connection.identity != identity:
            connection = self.connections.sender(fd, identity)
            if self._has_keys and not connection.is_closed and (key := _user_id(frame)):
                connection.share = self.connections.share(f"key {key}")
        connection.num_messages += 1
        return None if connection.is_cut_off else connection


def _user_id(frame: zmq.Frame) -> str:
    """Return a client's CURVE key; empty for the pipeline's own processes."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:  # their endpoint asks no ZAP handler, also in a cluster
        return ""
