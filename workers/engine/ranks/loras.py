"""LoRA adapters on the ranks.

They are loaded before requests use them: vLLM itself would load an adapter within a step, where a
changed file ends the engine.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

from ....schemas.artifacts.loras import LoraSupport, StoredLora
from ....schemas.base.errors import MidstreamError, Translated
from ....storage.formats.lora_files import LoraError, check, folder_of, read
from .collective import LoadCall, RankCache, Ranks


class RankLoras(RankCache[StoredLora]):
    """The cache of adapters; each counts 1."""

    put = "midstream_put_lora"
    drop = "midstream_drop_loras"
    dropping = "dropping an adapter"

    def __init__(
        self, ranks: Ranks, root: str, budget: int, support: Callable[[], LoraSupport | None]
    ) -> None:
        """`root`: the folder of adapters. `support`: returns what the model accepts."""
        super().__init__(ranks, budget)
        self._root = root
        self._support = support
        # digest → vLLM's number of every adapter ever loaded; numbers are never reused
        self._numbers: dict[str, int] = {}

    def number(self, digest: str) -> int:
        """Return vLLM's number of an adapter that is held."""
        return self._numbers[digest]

    def _key(self, item: StoredLora) -> str:
        return item.digest

    def _size(self, item: StoredLora) -> int:
        return 1

    def _handle(self, key: str) -> int:
        return self._numbers[key]

    async def _prepare(self, item: StoredLora) -> LoadCall:
        folder = await asyncio.to_thread(self._check, item)
        number = self._numbers.setdefault(item.digest, len(self._numbers) + 1)
        return LoadCall(f"loading adapter {item.name!r}", (number, item.digest, str(folder)))

    def _check(self, lora: StoredLora) -> Path:
        """Return the folder of the adapter's files.

        Raises MidstreamError("invalid_request") when the files are not what was registered, or do
        not fit this model.
        """
        if (support := self._support()) is None:
            raise MidstreamError(
                "invalid_request",
                "this worker serves no adapters: its setting engine.max_loras is 0",
                field="lora",
            )
        folder = folder_of(self._root, lora.path)
        with Translated(
            LoraError,
            lambda error: MidstreamError(
                "invalid_request",
                f"adapter {lora.name!r} ({lora.digest[:12]}): {error}",
                field="lora",
            ),
        ):
            content = read(folder)
            if content.digest != lora.digest:
                raise LoraError(
                    f"its files have changed since it was registered (now {content.digest[:12]}): "
                    "register it again"
                )
            check(content, support)
        return folder
