"""The exception that commands raise for their user."""


class LaunchError(Exception):
    """A command can't be carried out; the message is one sentence for the user."""
