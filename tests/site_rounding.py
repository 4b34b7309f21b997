"""Triton's interpreter with the rounding that GPUs have."""

import torch
import triton.language as tl
from triton.runtime import interpreter


def round_as_gpus_do() -> None:
    """The interpreter cuts float32 to bfloat16; GPUs, and Triton's language by its definition,
    round to the nearest, ties to even.
    """
    plain = interpreter.InterpreterBuilder.create_fp_trunc

    def create_fp_trunc(self: object, source: object, target: object) -> object:
        if target.scalar != tl.bfloat16:
            return plain(self, source, target)
        rounded = torch.from_numpy(source.data).to(torch.bfloat16).view(torch.uint16).numpy()
        return interpreter.TensorHandle(rounded, tl.bfloat16)

    interpreter.InterpreterBuilder.create_fp_trunc = create_fp_trunc
