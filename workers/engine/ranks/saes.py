"""Cache of the sparse autoencoders that ranks hold to compute features of rows."""

import asyncio
from collections.abc import Sequence

from ....schemas.artifacts.saes import StoredSae
from ....schemas.base.errors import MidstreamError
from ....storage.formats.sae_files import folder_of
from .collective import LoadCall, RankCache, Ranks


class RankSaes(RankCache[StoredSae]):
    """The cache of sparse autoencoders; sizes are bytes of weights that a rank holds."""

    put = "midstream_put_sae"
    drop = "midstream_drop_saes"
    dropping = "dropping a sparse autoencoder"

    def __init__(self, ranks: Ranks, root: str, budget: int) -> None:
        """`root`: the folder that contains the autoencoders' folders."""
        super().__init__(ranks, budget)
        self._root = root

    def _key(self, item: StoredSae) -> str:
        return item.digest

    def _size(self, item: StoredSae) -> int:
        return item.bytes

    async def hold(self, items: Sequence[StoredSae]) -> None:
        if (size := sum(sae.bytes for sae in items)) > self._budget:
            names = ", ".join(repr(sae.name) for sae in items)
            detail = (
                f"{size} bytes of weights ({names}) exceed the {self._budget >> 20} MiB that "
                "the worker holds (setting tuning.sae_cache_mib)"
            )
            raise MidstreamError("invalid_request", detail, field="features")
        await super().hold(items)

    async def _prepare(self, item: StoredSae) -> LoadCall:
        folder = await asyncio.to_thread(folder_of, self._root, item.path)
        return LoadCall(
            f"loading sparse autoencoder {item.name!r}",
            (item.digest, item.hook, item.layer, str(folder)),
        )
