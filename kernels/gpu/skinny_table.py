"""The fastest way to multiply few rows, measured; written by `penstock.kernels.bench.linear`.

(kind, rows of the weight, inner dimension, rows of x up to) -> the fields of
`penstock.kernels.gpu.skinny.Config`, or None where cuBLAS and separate kernels are faster.
"""

Key = tuple[str, int, int, int]
Entry = tuple[str, int, int, int, int, int, int]

TABLE: dict[Key, Entry | None] = {
    ("add", 1024, 2048, 1): ("gemv", 2, 2048, 1, 2, 1, 0),
    ("add", 1024, 2048, 16): ("slices", 8, 512, 1, 4, 5, 512),
    ("add", 1024, 2048, 32): ("mma", 16, 256, 8, 4, 3, 512),
    ("add", 1024, 2048, 64): ("mma", 32, 128, 4, 8, 5, 512),
    ("add", 1024, 3072, 1): ("gemv", 2, 4096, 1, 4, 1, 0),
    ("add", 1024, 3072, 16): ("slices", 8, 512, 1, 4, 5, 512),
    ("add", 1024, 3072, 32): ("mma", 16, 256, 3, 4, 5, 512),
    ("add", 1024, 3072, 64): ("mma", 32, 128, 4, 4, 5, 512),
    ("add", 4096, 4096, 1): ("gemv", 2, 4096, 1, 8, 1, 0),
    ("add", 4096, 4096, 16): ("mma", 32, 128, 3, 4, 3, 0),
    ("add", 4096, 4096, 32): ("mma", 64, 256, 4, 4, 3, 0),
    ("add", 4096, 4096, 64): ("mma", 32, 128, 1, 4, 5, 512),
    ("add", 4096, 12288, 1): ("gemv", 8, 512, 1, 4, 3, 0),
    ("add", 4096, 12288, 16): ("slices", 32, 512, 1, 4, 3, 0),
    ("add", 4096, 12288, 32): ("mma", 64, 128, 4, 4, 3, 0),
    ("add", 4096, 12288, 64): ("mma", 64, 128, 2, 4, 5, 512),
    ("logits", 151936, 1024, 1): ("gemv", 4, 1024, 1, 4, 1, 0),
    ("logits", 151936, 1024, 16): ("mma", 128, 128, 1, 4, 3, 0),
    ("logits", 151936, 1024, 32): None,
    ("logits", 151936, 1024, 64): None,
    ("logits", 151936, 4096, 1): ("gemv", 2, 4096, 1, 8, 1, 0),
    ("logits", 151936, 4096, 16): ("mma", 128, 128, 1, 4, 3, 0),
    ("logits", 151936, 4096, 32): None,
    ("logits", 151936, 4096, 64): None,
    ("norm", 4096, 1024, 1): ("gemv", 4, 1024, 1, 2, 1, 0),
    ("norm", 4096, 1024, 16): None,
    ("norm", 4096, 1024, 32): None,
    ("norm", 4096, 1024, 64): None,
    ("norm", 6144, 4096, 1): ("gemv", 2, 4096, 1, 8, 1, 0),
    ("norm", 6144, 4096, 16): None,
    ("norm", 6144, 4096, 32): None,
    ("norm", 6144, 4096, 64): None,
    ("swiglu", 6144, 1024, 1): ("gemv", 2, 1024, 1, 2, 1, 0),
    ("swiglu", 6144, 1024, 16): None,
    ("swiglu", 6144, 1024, 32): None,
    ("swiglu", 6144, 1024, 64): None,
    ("swiglu", 24576, 4096, 1): ("gemv", 2, 4096, 1, 8, 1, 0),
    ("swiglu", 24576, 4096, 16): None,
    ("swiglu", 24576, 4096, 32): None,
    ("swiglu", 24576, 4096, 64): None,
}
