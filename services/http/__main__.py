"""Entry point of an HTTP server: `python -P -m penstock.services.http`."""

import asyncio

import uvloop

from penstock.protocol.client.session import ClientError
from penstock.protocol.transport.process import Process
from penstock.services.http.process import serve


def main() -> None:
    """Run until SIGTERM."""
    process = Process("http")
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(process))
    except (OSError, ClientError) as error:
        raise SystemExit(f"http can't run: {error}") from error
    process.context.destroy()


if __name__ == "__main__":
    main()
