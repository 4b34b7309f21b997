"""Mends Triton's interpreter: `&` of two masks gives integers there, which its loads and stores
refuse as a mask.
"""

from typing import Any


def mend() -> None:
    """Called by vLLM in each of its processes, as a general plug-in.

    The masks of vLLM's n-gram kernels need it.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    if getattr(InterpreterBuilder, "midstream_mended", False):
        return
    load = InterpreterBuilder.create_masked_load
    store = InterpreterBuilder.create_masked_store

    def as_mask(mask: Any) -> Any:
        return TensorHandle(mask.data.astype(bool), mask.dtype)

    InterpreterBuilder.create_masked_load = lambda self, pointers, mask, *more: load(
        self, pointers, as_mask(mask), *more
    )
    InterpreterBuilder.create_masked_store = lambda self, pointers, value, mask, *more: store(
        self, pointers, value, as_mask(mask), *more
    )
    InterpreterBuilder.midstream_mended = True
