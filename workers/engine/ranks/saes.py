"""Sparse autoencoders on the ranks: each is loaded once, by all ranks that read rows for it or by
none, and kept while in use.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence

from ....schemas.artifacts.saes import StoredSae
from ....schemas.base.errors import MidstreamError
from ....schemas.base.settings import Settings
from ....storage.formats.sae_files import folder_of
from .collective import Ranks, Undo, unbroken


def served(settings: Settings) -> str:
    """Return why no features are read; empty: they are."""
    return "" if settings.sae_dir else "the setting sae_dir is empty"


class RankSaes:
    """The worker's record of the autoencoders on the ranks; unused ones stay loaded while there is
    room.

    A holder takes all that it needs in one turn, and holds nothing while it waits: two cannot wait
    for each other's room.
    """

    def __init__(self, ranks: Ranks, root: str, budget: int) -> None:
        """`root`: the setting `sae_dir`. `budget`: bytes of weights that a rank holds."""
        self._ranks, self._root, self._budget = ranks, root, budget
        # digest → bytes; least recently used first
        self._loaded: OrderedDict[str, int] = OrderedDict()
        self._held: Counter[str] = Counter()
        self._turn = asyncio.Lock()  # first come, first served
        self._freed = asyncio.Event()

    async def hold(self, saes: Sequence[StoredSae]) -> None:
        """See `Engine.hold_saes`."""
        if (size := sum(sae.bytes for sae in saes)) > self._budget:
            names = ", ".join(repr(sae.name) for sae in saes)
            detail = (
                f"{size} bytes of weights ({names}) exceed the {self._budget >> 20} MiB that "
                "the worker holds (setting sae_cache_mib)"
            )
            raise MidstreamError("invalid_request", detail, field="features")
        digests = {sae.digest for sae in saes}
        async with self._turn:
            for sae in saes:
                if sae.digest not in self._loaded:
                    await self._load(sae, digests)
            self._held.update(digests)
            for digest in digests:
                self._loaded.move_to_end(digest)

    def release(self, saes: Sequence[StoredSae]) -> None:
        """Undo one `hold`."""
        for sae in saes:
            self._held[sae.digest] -= 1
            if not self._held[sae.digest]:
                del self._held[sae.digest]
        self._freed.set()

    async def _load(self, sae: StoredSae, needed: Collection[str]) -> None:
        folder = await asyncio.to_thread(folder_of, self._root, sae.path)
        await self._make_room(sae.bytes, needed)
        undo = Undo("midstream_drop_saes", ([sae.digest],))
        load = self._ranks.apply(
            f"loading sparse autoencoder {sae.name!r}",
            "midstream_put_sae",
            sae.digest,
            sae.hook,
            sae.layer,
            str(folder),
            undo=undo,
        )
        await unbroken(load)
        self._loaded[sae.digest] = sae.bytes

    async def _make_room(self, size: int, needed: Collection[str]) -> None:
        """Wait until that many bytes can be loaded, and drop what no request uses, `needed`
        aside.
        """
        while sum(self._loaded.values()) + size > self._budget:
            unused = next(
                (
                    digest
                    for digest in self._loaded
                    if digest not in self._held and digest not in needed
                ),
                None,
            )
            if unused is None:
                self._freed.clear()
                await self._freed.wait()
                continue
            # first: after a failure on one rank it is unknown which ranks have it
            del self._loaded[unused]
            await unbroken(
                self._ranks.apply("dropping a sparse autoencoder", "midstream_drop_saes", [unused])
            )
