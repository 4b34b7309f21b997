"""Makes vLLM zero every block of the KV cache before another request uses it.

Attention multiplies values at masked positions by zero, which does not cancel non-finite values.
So a block must keep nothing of the request that used it before, however that request ended. vLLM
can zero new blocks, and does if a model needs it; `install` makes it do so always, in the engine
core, which names the blocks, and on ranks. vLLM's CPU runners lack the zeroing: `CpuBlocks` adds
it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig


def install() -> None:
    """Make this process zero every block that a request begins to use."""
    # To zero only the blocks of requests with non-finite values, the scheduler would have to know
    # these in time. It learns of them a step too late, and overflowing keys need not reach the
    # stream at all.
    KVCacheConfig.needs_kv_cache_zeroing = property(lambda self: True)


# vLLM's v1 runner for CPUs omits layers with sliding windows, and its v2 runner needs Triton.
class CpuBlocks:
    """Mix-in of CPU model runners, v1 and v2, that zeroes blocks of all kinds, without Triton.

    To the v2 runner it is also vLLM's `KVBlockZeroer`.
    """

    kv_block_zeroer: "CpuBlocks"
    num_blocks: int  # of the scheduler; set before vLLM allocates the caches

    def _init_kv_zero_meta(self) -> None:
        self.kv_block_zeroer = self

    def _zero_block_ids(self, block_ids: Sequence[int]) -> None:
        self.zero_block_ids(block_ids)

    def zero_block_ids(self, block_ids: Sequence[int]) -> None:
        """Zero these blocks in all layers that this rank holds.

        A block of the scheduler may correspond to several blocks of a layer's cache.
        """
        # layers may share a cache
        for cache in {cache.data_ptr(): cache for cache in self._caches()}.values():
            parts = cache.shape[0] // self.num_blocks
            for block in block_ids:
                cache[block * parts : (block + 1) * parts].zero_()

    def warmup(self, num_kv_blocks: int) -> None:
        """Do nothing: there is no kernel to compile."""

    def _caches(self) -> list[torch.Tensor]:
        result: Any = self.kv_caches  # type: ignore[attr-defined]
        return [cache for cache in result if isinstance(cache, torch.Tensor)]
