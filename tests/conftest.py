"""Without a GPU, Triton's kernels run in its interpreter: it must know before it is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
