"""The exception that commands raise with a message for the user."""


class LaunchError(Exception):
    """A command can't be carried out; the message is one sentence for the user."""


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its class name without a message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
