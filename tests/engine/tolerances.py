"""How close is equal? Every numeric tolerance of the engine tests, with its reason."""

#: fp32 rows against transformers: both compute in fp32, in another order of operations.
FP32_ROWS = 1e-5
#: bf16 rows against transformers in bf16, SmolLM2, 30 layers: 8 bits of mantissa, each layer rounds on its own path.
BF16_ROWS = 0.03
#: The same rows in another batch composition, fp32: matrix kernels may sum in another order.
FP32_BATCH = 1e-5
#: v1 against v2, fp32: another attention kernel.
FP32_RUNNERS = 1e-5
