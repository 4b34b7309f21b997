"""LoRA adapters on the ranks: each is loaded once, by all ranks or by none, and kept while in
use.
"""

import asyncio
from collections import Counter, OrderedDict
from pathlib import Path

from ....schemas.artifacts.loras import LoraSupport, StoredLora
from ....schemas.base.errors import MidstreamError
from ....storage.formats.lora_files import LoraError, check, folder_of, read
from .collective import Ranks, Undo, unbroken


class RankLoras:
    """The worker's record of the adapters on the ranks; unused ones stay loaded while there is
    room.

    A holder holds one at a time: two that waited for each other's room would deadlock. vLLM never
    loads one itself, which it would do within a step, where a file that has changed ends the
    engine.
    """

    def __init__(self, ranks: Ranks, root: str, most: int) -> None:
        """`root`: the setting `lora_dir`. `most`: adapters that the ranks hold."""
        self._ranks, self._root, self._most = ranks, root, most
        self._loaded: OrderedDict[str, int] = (
            OrderedDict()
        )  # digest → its number at vLLM; least recently used first
        self._numbers: dict[
            str, int
        ] = {}  # of all that were ever loaded: a number means one content
        self._held: Counter[str] = Counter()
        self._turn = asyncio.Lock()  # first come, first served
        self._freed = asyncio.Event()

    def number(self, digest: str) -> int:
        """Return the number of an adapter that is held."""
        return self._loaded[digest]

    async def hold(self, lora: StoredLora, support: LoraSupport | None) -> None:
        """See `Engine.hold_lora`. `support`: what the model accepts."""
        async with self._turn:
            if lora.digest not in self._loaded:
                folder = await asyncio.to_thread(self._check, lora, support)
                await self._make_room()
                await unbroken(self._load(lora, folder))
            self._held[lora.digest] += 1
            self._loaded.move_to_end(lora.digest)

    def release(self, lora: StoredLora) -> None:
        """Undo one `hold`."""
        self._held[lora.digest] -= 1
        if not self._held[lora.digest]:
            del self._held[lora.digest]
        self._freed.set()

    def _check(self, lora: StoredLora, support: LoraSupport | None) -> Path:
        """The folder of its files.

        Raises a 400 when they are not what was registered, or do not fit this model.
        """
        if support is None:
            raise MidstreamError(
                "invalid_request",
                "this worker serves no adapters: its setting lora_dir is empty",
                field="lora",
            )
        folder = folder_of(self._root, lora.path)
        try:
            content = read(folder)
            if content.digest != lora.digest:
                raise LoraError(
                    f"its files have changed since it was registered (now {content.digest[:12]}): "
                    "register it again"
                )
            check(content, support)
        except LoraError as error:
            raise MidstreamError(
                "invalid_request",
                f"adapter {lora.name!r} ({lora.digest[:12]}): {error}",
                field="lora",
            ) from error
        return folder

    async def _make_room(self) -> None:
        """Wait until another one can be loaded, and drop what no request uses."""
        while len(self._loaded) >= self._most:
            unused = next((digest for digest in self._loaded if digest not in self._held), None)
            if unused is None:
                self._freed.clear()
                await self._freed.wait()
                continue
            number = self._loaded.pop(
                unused
            )  # first: after a failure on one rank it is unknown which ranks have it
            await unbroken(
                self._ranks.apply("dropping an adapter", "midstream_drop_loras", [number])
            )

    async def _load(self, lora: StoredLora, folder: Path) -> None:
        number = self._numbers.setdefault(lora.digest, len(self._numbers) + 1)
        undo = Undo("midstream_drop_loras", ([number],))
        await self._ranks.apply(
            f"loading adapter {lora.name!r}",
            "midstream_put_lora",
            number,
            lora.digest,
            str(folder),
            undo=undo,
        )
        self._loaded[lora.digest] = number
