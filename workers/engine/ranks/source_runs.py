"""Source runs on the ranks: whole runs, within a budget of bytes over all stages."""

import msgspec

from ....schemas.requests.source_runs import RunFiles
from .collective import LoadCall, RankCache


class RankRuns(RankCache[RunFiles]):
    """The cache of source runs; sizes are bytes of rows."""

    # Runs are whole, and the worker alone evicts them: if ranks held parts of runs, or different
    # ones, nobody would know which requests they can serve.
    put = "midstream_put_run"
    drop = "midstream_drop_runs"
    dropping = "dropping source runs"

    def _key(self, item: RunFiles) -> str:
        return item.key

    def _size(self, item: RunFiles) -> int:
        # Every rank counts the rows of all stages: otherwise a run could fit on some ranks only.
        return item.bytes

    async def _prepare(self, item: RunFiles) -> LoadCall:
        return LoadCall(f"loading source run {item.key}", (msgspec.to_builtins(item),))
