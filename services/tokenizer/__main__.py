"""Entry point of a tokenizer: `python -P -m penstock.services.tokenizer`."""

from penstock.protocol.messages.pipeline import Goodbye
from penstock.protocol.transport.process import Process
from penstock.services.tokenizer.process import TokenizerProcess


def main() -> None:
    """Run until SIGTERM. Other tokenizers then take over the open requests."""
    process = Process("tokenizer")
    tokenizer = TokenizerProcess(process)
    tokenizer.loop.run()
    tokenizer.gateway.send(Goodbye())
    process.context.destroy()


if __name__ == "__main__":
    main()
