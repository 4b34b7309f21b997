"""KV blocks of a sweep's unpatched prompt, kept so that its cells skip the tokens before their
patch.

The prefix cache shares only whole blocks, and a one-sentence prompt fills none. Therefore the
scheduler keeps references to the blocks of an unpatched prompt when it ends, including a partly
filled last one. A cell with the same tokens starts at the first position that it patches; if that
is within a block, vLLM's support of partial hits copies the block.
"""

from collections import OrderedDict
from typing import Any

#: Prompts kept at most; the least recently used are dropped first.
PROMPTS = 16
#: At most 1 / SHARE of all blocks are kept; they are freed when fewer than twice as many are free.
SHARE = 8


class KeptBlocks:
    """Kept blocks of one scheduler."""

    def __init__(self, manager: Any) -> None:
        """`manager`: vLLM's `KVCacheManager`."""
        self._manager = manager
        self._pool = manager.block_pool
        # name → tokens and blocks of the prompt, in order
        self._kept: OrderedDict[str, tuple[list[int], list[Any]]] = OrderedDict()
        # Other kinds of caches free blocks in the middle, or hold states instead of positions.
        managers = manager.coordinator.single_type_managers
        plain = len(managers) == 1 and type(managers[0]).__name__ == "FullAttentionManager"
        self._block_size = managers[0].block_size if plain and manager.enable_caching else 0

    def __contains__(self, name: str) -> bool:
        return name in self._kept

    @property
    def number(self) -> int:
        """Return the number of kept blocks."""
        return sum(len(blocks) for _, blocks in self._kept.values())

    def keep(self, name: str, request: Any) -> None:
        """Keep the blocks of a request's prompt, which was computed completely, before vLLM frees
        them.
        """
        if not self._block_size:
            return
        if name in self._kept:  # from an earlier attempt
            self._give_up(name)
        blocks = list(
            self._manager.get_blocks(request.request_id).blocks[0][
                : -(-request.num_prompt_tokens // self._block_size)
            ]
        )
        if (
            any(block.is_null for block in blocks)
            or len(blocks) > self._pool.num_gpu_blocks // SHARE
        ):
            return
        self._pool.touch(blocks)
        self._kept[name] = list(request.all_token_ids[: request.num_prompt_tokens]), blocks
        while len(self._kept) > PROMPTS or self.number > self._pool.num_gpu_blocks // SHARE:
            self._give_up(next(iter(self._kept)))

    def find(self, name: str, request: Any, tokens: int) -> tuple[Any, int] | None:
        """Return (vLLM's blocks, `tokens`) for the first `tokens` positions of a kept prompt.

        None if the prompt is not kept, if the request begins differently, or if no token of it
        would remain to be computed.
        """
        prompt, blocks = self._kept.get(name, ([], []))
        if not 0 < tokens < request.num_prompt_tokens or prompt[:tokens] != list(
            request.all_token_ids[:tokens]
        ):
            return None
        self._kept.move_to_end(name)
        return self._manager.create_kv_cache_blocks(
            (blocks[: -(-tokens // self._block_size)],)
        ), tokens

    def make_room(self, stuck: bool) -> None:
        """Free all kept blocks if blocks are scarce, or if requests wait and none can proceed
        (`stuck`).
        """
        if self._kept and (
            stuck or self._pool.get_num_free_blocks() < 2 * self._pool.num_gpu_blocks // SHARE
        ):
            self.clear()

    def clear(self) -> None:
        for name in list(self._kept):
            self._give_up(name)

    def _give_up(self, name: str) -> None:
        self._pool.free_blocks(reversed(self._kept.pop(name)[1]))
