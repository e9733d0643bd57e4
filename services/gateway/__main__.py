"""`python -P -m penstock.services.gateway`: the gateway on uvloop."""

import signal
from collections.abc import Callable

import uvloop
import zmq

from penstock.protocol.transport.channel import HEARTBEAT_INTERVAL
from penstock.protocol.transport.heartbeat import HeartbeatThread
from penstock.protocol.transport.process import Process
from penstock.services.gateway.process import Gateway
from penstock.services.gateway.timers import Timer


def main() -> None:
    """Runs until SIGTERM, or, when the supervisor reports that the pipeline is to stop, until
    nothing is open."""
    process = Process("gateway")
    loop = uvloop.new_event_loop()
    goes_on = False

    def call_later(seconds: float, function: Callable[[], None]) -> Timer:
        def call() -> None:
            function()
            pump()

        return loop.call_later(seconds, call)

    gateway = Gateway(process, call_later)
    heartbeats = HeartbeatThread(process, gateway.counters)

    def pump() -> None:
        nonlocal goes_on
        if not goes_on and gateway.pump():
            goes_on = True
            loop.call_soon(go_on)  # behind timers and signals

    def go_on() -> None:
        nonlocal goes_on
        goes_on = False
        pump()

    def heartbeat() -> None:
        loop.call_later(HEARTBEAT_INTERVAL, heartbeat)
        gateway.on_heartbeat()
        heartbeats.beat()
        pump()

    for channel, _ in gateway.handlers:
        loop.add_reader(channel.socket.getsockopt(zmq.FD), pump)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, loop.stop)
    heartbeat()
    loop.run_forever()
    heartbeats.stop()
    process.context.destroy()


main()
