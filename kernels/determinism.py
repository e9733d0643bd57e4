"""The choice between the fastest kernels and those whose rows do not depend on other rows."""

_is_deterministic = False


def use_deterministic_kernels(enabled: bool) -> None:
    """Let kernels on GPUs compute each row with the same bits in every batch, in this process.

    Set it before the first step: CUDA graphs keep the kernels with which they were captured.
    """
    global _is_deterministic
    _is_deterministic = enabled


def is_deterministic() -> bool:
    """Return True if a row's bits must not depend on the other rows."""
    return _is_deterministic
