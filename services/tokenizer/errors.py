"""The refusal of a prompt."""


class PromptError(ValueError):
    """A prompt that can't be served: which field, and why; too_long: as in ErrorReply."""

    def __init__(self, field: str, message: str, too_long: tuple[int, int] | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.too_long = too_long
