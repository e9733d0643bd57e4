"""Shares of clients in what has a limit."""

RESERVED = 8  # one more place for every N places of a limit is kept for clients that have few


def exceeds(new: int, own: int, total: int, limit: int) -> bool:
    """Return whether a client with `own` of `total` places is to be refused `new` more.

    Up to the limit a client may have any number. Beyond the limit there are a few more places, of
    which a client may have as many as it leaves free: a client that has filled the limit gets none.
    """
    free = limit + -(-limit // RESERVED) - total
    return total + new > limit and not (own < free >= new)
