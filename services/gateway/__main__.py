"""Entry point of the gateway: `python -P -m penstock.services.gateway`."""

from penstock.protocol.transport.event_loop import EventLoop
from penstock.protocol.transport.heartbeat import HeartbeatThread
from penstock.protocol.transport.process import Process
from penstock.services.gateway.process import Gateway


def main() -> None:
    """Run until SIGTERM, or until a draining pipeline has no open request."""
    process = Process("gateway")
    gateway = Gateway(process, lambda seconds, function: loop.call_later(seconds, function))
    heartbeats = HeartbeatThread(process, gateway.status.counters)
    loop = EventLoop(process.context, gateway.on_heartbeat, heartbeats, gateway.after_turn)
    for handler in gateway.handlers:
        loop.add(*handler)
    loop.run()
    process.context.destroy()


if __name__ == "__main__":
    main()
