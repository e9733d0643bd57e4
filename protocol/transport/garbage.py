"""Python's garbage collector in processes that serve requests."""

import gc

YOUNG_OBJECTS = 10_000
"""containers after which the newest are visited. Python's default, 700, are those of a few requests
that have just begun: in a burst, a seventh of all CPU time went into visits that found nothing"""


def tune_collector() -> None:
    """Leave modules, configuration and vocabulary out of collections, which become rarer."""
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
