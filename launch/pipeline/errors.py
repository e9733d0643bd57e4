"""The exception that commands raise for their user."""


class LaunchError(Exception):
    """A command can't be carried out; the message is one sentence for the user."""


def first_line(error: BaseException) -> str:
    """Return the first line of a message, or the name of an exception without one."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
