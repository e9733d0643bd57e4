"""Makes the scheduler of every pipeline with this folder on PYTHONPATH accept drafts by number.

`PYTHONPATH=tests/gpu/forced:. FORCED_DRAFTS=2 launch bench latency --speculative-method mtp …`
"""

import os

from tests.gpu.forced_drafts import force

force(int(os.environ["FORCED_DRAFTS"]))
