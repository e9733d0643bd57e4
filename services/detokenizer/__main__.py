"""Entry point of a detokenizer: `python -P -m penstock.services.detokenizer`."""

from penstock.protocol.messages.pipeline import Goodbye
from penstock.protocol.transport.process import Process
from penstock.services.detokenizer.process import DetokenizerProcess


def main() -> None:
    """Run until SIGTERM. Other detokenizers then take over the streams."""
    process = Process("detokenizer")
    detokenizer = DetokenizerProcess(process)
    detokenizer.loop.run()
    detokenizer.send_to_schedulers(Goodbye())
    process.context.destroy()


if __name__ == "__main__":
    main()
