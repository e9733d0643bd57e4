"""A restart that is asked for: when the processes are back in the pipeline."""

from collections.abc import Awaitable, Callable

from penstock.launch.pipeline.procfile import kind_of
from penstock.protocol.client.client import AsyncClient
from penstock.protocol.messages.client import StatusRequest
from penstock.protocol.messages.status import StatusReply

Step = Callable[[], Awaitable[None]]


async def restart(
    connect: Callable[[], AsyncClient], names: set[str], stop: Step, start: Step
) -> None:
    """Stop and starts processes of one kind; return when they are back and all is ready.

    Only the pipeline knows that they are, and it knows them by their names, which are those of
    their predecessors. So for each kind there must be a sign that can't be one of these.
    """
    async with connect() as client:
        match kind_of(min(names)):
            case "tokenizer" | "detokenizer":  # the names go, and come back
                await stop()
                await _until(client, lambda present: not names & present)
                await start()
                await _until(client, lambda present: names <= present)
            case "scheduler" | "worker":  # without them nothing is ready
                answer = client.ask(StatusRequest(wait=True, fresh=True))
                await client.status()  # asked after it: the gateway has both
                await stop()
                await start()
                while not answer.final:
                    await client.change(answer)
            case _:
                await stop()
                await start()
    async with connect() as client:  # a connection that its predecessor never had
        await client.status(wait=True)


async def _until(client: AsyncClient, found: Callable[[set[str]], bool]) -> None:
    """Look at every report of the scheduler until its names are as wanted."""
    while not found(_present(await client.status(fresh=True))):
        pass


def _present(status: StatusReply) -> set[str]:
    """Return the tokenizers and detokenizers that are registered."""
    return {*status.tokenizers, *(status.scheduler.detokenizers if status.scheduler else ())}
