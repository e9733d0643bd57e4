"""`python -P -m penstock.services.gateway`: the gateway on uvloop."""

import signal

import uvloop
import zmq

from penstock.protocol.process import Process
from penstock.protocol.sockets import HEARTBEAT_INTERVAL
from penstock.services.gateway.process import Gateway


def main() -> None:
    """Runs until SIGTERM."""
    process = Process("gateway")
    gateway = Gateway(process)
    loop = uvloop.new_event_loop()
    for channel, _ in gateway.handlers:
        loop.add_reader(channel.socket.getsockopt(zmq.FD), gateway.pump)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, loop.stop)

    def heartbeat() -> None:
        gateway.on_heartbeat()
        loop.call_later(HEARTBEAT_INTERVAL, heartbeat)

    heartbeat()
    loop.run_forever()
    process.context.destroy()


main()
