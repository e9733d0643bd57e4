"""How many examples the property tests run: `PENSTOCK_EXAMPLES`, or few."""

import os

from hypothesis import settings

settings.register_profile(
    "scheduler",
    max_examples=int(os.environ.get("PENSTOCK_EXAMPLES", "150")),
    stateful_step_count=40,
    deadline=None,
)
