"""Has every block of the KV cache zeroed before a request uses it again.

Attention multiplies the values at masked positions by zero, which does not cancel one that is not
finite. So a block must not bring anything from the request that had it before, however that one
ended. vLLM can zero new blocks and does so where it needs to; `install` makes it do so always, in
the engine core, which names the blocks, and on ranks. What its CPU runners lack is `CpuBlocks`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig


def install() -> None:
    """Have this process zero every block that a request begins to use."""
    KVCacheConfig.needs_kv_cache_zeroing = property(lambda self: True)


class CpuBlocks:
    """Mixed in front of a CPU model runner, v1 or v2: zeroes blocks of all kinds, without
    Triton.
    """

    kv_block_zeroer: "CpuBlocks"

    def _init_kv_zero_meta(self) -> None:
        self.kv_block_zeroer = self

    def _zero_block_ids(self, block_ids: Sequence[int]) -> None:
        self.zero_block_ids(block_ids)

    def zero_block_ids(self, block_ids: Sequence[int]) -> None:
        """Zero these blocks in all layers that this rank holds.

        A block of the scheduler may be several of a layer's cache.
        """
        caches: dict[int, torch.Tensor] = {
            cache.data_ptr(): cache for cache in self._caches()
        }  # layers may share one
        num_blocks = self.kv_cache_config.num_blocks  # type: ignore[attr-defined]
        for cache in caches.values():
            parts = cache.shape[0] // num_blocks
            for block in block_ids:
                cache[block * parts : (block + 1) * parts].zero_()

    def _caches(self) -> list[torch.Tensor]:
        result: Any = self.kv_caches  # type: ignore[attr-defined]
        return [cache for cache in result if isinstance(cache, torch.Tensor)]
