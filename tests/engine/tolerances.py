"""How close is equal? Every numeric tolerance of the engine tests, with its reason."""

from typing import NamedTuple

#: fp32 rows of the 4-layer models against transformers: the same arithmetic in another order.
FP32_ROWS = 1e-5
#: fp32, 30 layers: all rows of a layer together, relative to their length (measured: 3.8e-6 at most
#: over 56,610 rows).
FP32_LAYERS = 1e-5
#: fp32, 30 layers, single rows: the worst of many (measured: p99.9 8e-6, worst 2.3e-5; vLLM's CPU
#: kernels use faster exponentials).
FP32_ROWS_30_LAYERS = 5e-5
#: bf16 has 8 bits of mantissa, so transformers itself is 1 % from its fp32 rows. Captured rows may
#: be this much further away.
BF16_EXCESS = 1.5
#: The same rows in another batch composition, fp32: matrix kernels may sum in another order.
FP32_BATCH = 1e-5
#: As FP32_BATCH in bf16, after 30 layers: a rounding is 0.4 % of a coordinate.
BF16_BATCH = 0.02
#: As BF16_BATCH in fp16, whose roundings are an eighth.
FP16_BATCH = 0.005
#: nats: what a steered token's log-probability differs by from the plain one's at least; far above
#: any rounding in bf16.
LOGPROB_MOVED = 0.5
#: fp32, nats: log-probabilities of generated tokens against transformers' (logits of some tens,
#: whose rows agree to FP32_ROWS).
FP32_LOGPROBS = 1e-3
#: fp32: a query's share of attention on one key, against transformers' eager attention: softmax of
#: the same scores in another order.
FP32_ATTENTION = 1e-5
#: As FP32_ROWS, at every hook of every architecture, with edits four times as long as a row
#: (measured: 7.3e-6, of Mixtral's experts).
FP32_HOOKS = 2e-5
#: fp32, 30 layers, logit differences of some tens against TransformerLens: as FP32_ROWS_30_LAYERS,
#: through the last matrix.
LENS_LOGITS = 1e-3
#: fp32, 30 layers, logit differences of the same prompt in two batches.
FP32_BATCH_LOGITS = 5e-4
#: fp32, nats: a forward that begins at a layer with captured rows against one from the first layer,
#: in another batch (measured: 0).
FP32_ENTERED = 1e-5


#: fp32, quantised activations: a single row. A number that lies between two codes falls to the one
#: or to the other as the last bit of a sum decides; that row differs by one code (int8: 1/127 of
#: its largest number, FP8: 1/16 of the number), and later tokens attend to it (measured: 0.15; rows
#: of another layer or another scale differ by 1 and more).
FP32_CODES = 0.3


class Tolerance(NamedTuple):
    limit: float
    reason: str


#: The tolerances for `docs/reference/fidelity.md`; the page quotes them.
FIDELITY = {
    "float32": Tolerance(
        FP32_HOOKS,
        "error of a row relative to its norm, against transformers in fp32: the same "
        "arithmetic in a different order (other matrix "
        "kernels, another attention implementation), over four layers",
    ),
    "bfloat16": Tolerance(
        BF16_EXCESS,
        "multiple of transformers' own bf16 error, both against transformers in fp32: "
        "the two round in different places, so "
        "they are equally far from the truth, but differ from each other; where a "
        "router chooses experts, the figure is that of "
        "the median row, and the median over five prompts, because rounding decides "
        "the expert of a token near a tie, and later "
        "tokens attend to it",
    ),
}

#: The tolerances for `docs/vllm.md`; the page quotes them.
QUANTISED = {
    "fp32": Tolerance(
        FP32_HOOKS,
        "error of a row relative to its norm, against transformers in fp32, as in "
        "fidelity.md; where activations are rounded, of the "
        f"median row, and {FP32_CODES} of every row: the last bit of a sum may decide "
        "between two codes",
    ),
    "fp16, bf16": Tolerance(
        BF16_EXCESS,
        (
            "multiple of transformers' own error in that dtype, both against transformers "
            "in fp32, over all rows together"
        ),
    ),
}
