"""Source runs on the ranks: whole runs, within a budget of bytes over all stages."""

import msgspec

from ....schemas.requests.source_runs import RunFiles
from .collective import LoadCall, RankCache


class RankRuns(RankCache[RunFiles]):
    """The cache of source runs; sizes are bytes of rows."""

    put, drop, dropping = "midstream_put_run", "midstream_drop_runs", "dropping source runs"

    def _key(self, item: RunFiles) -> str:
        return item.key

    def _size(self, item: RunFiles) -> int:
        return item.bytes

    async def _prepare(self, item: RunFiles) -> LoadCall:
        return LoadCall(f"loading source run {item.key}", (msgspec.to_builtins(item),))
