"""Hits in the ledger's Redis: read, marked, and their texts deleted. `lua/shared/hits.lua` of the
ledger writes them.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from midstream.broker.ledger.core.script_arguments import pack
from midstream.broker.ledger.jobs.ledger import Ledger, LedgerPart, of_each, reachable
from midstream.broker.ledger.named.registry import Registry
from midstream.broker.ledger.results import pages
from midstream.schemas.artifacts.hits import HitText, StoredHit
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import from_json, from_msgpack, now, to_json
from midstream.schemas.requests.policies import POLICIES

from .records import HitVerdict, Mark, VersionPrecision

#: Folder of the scripts, and the functions of the ledger that they use.
LUA = Path(__file__).parent / "lua"
PARTS = ("arguments", "job", "hits")
#: Hits read in total for one page: all that a policy keeps by default.
PAGE_SCAN = 2000
#: Hits read at once, where all are read.
AT_ONCE = 500


class KeptHit(NamedTuple):
    """A hit as it is kept, without its text."""

    id: str
    at: float
    tenant: str
    hit: StoredHit
    mark: Mark | None


class KeptText(NamedTuple):
    """The tokens around a hit."""

    token_ids: list[int]
    first: int  # position of the first of them
    prompt_tokens: int


class LedgerHits(LedgerPart):
    """The hits of one policy of a model."""

    def __init__(self, ledger: Ledger, model: str, policy: str) -> None:
        super().__init__(ledger)
        self._own = ledger.scripts_of(LUA, PARTS)
        self._policy = f"{model}:{policy}"
        self._listed = f"ms:policy-hits:{self._policy}"
        self._unmarked = f"ms:policy-unmarked:{self._policy}"

    def _record(self, hit_id: str) -> str:
        return f"ms:policy-hit:{self._policy}:{hit_id}"

    @reachable
    async def page(
        self, wanted: Callable[[KeptHit], bool], limit: int, cursor: str | None
    ) -> tuple[list[KeptHit], str | None]:
        """Return wanted hits, newest first, and the cursor of the next page. Where few are wanted,
        a page may be short and still have a cursor.

        Raises MidstreamError("invalid_request") for an invalid cursor.
        """

        async def read(chunk: pages.Chunk) -> list[KeptHit | None]:
            return await self._read([name for name, _ in chunk])

        older = partial(pages.older, self._redis, self._listed)
        return await pages.page(pages.parse_cursor(cursor), limit, older, read, wanted, PAGE_SCAN)

    @reachable
    async def get(self, hit_id: str) -> KeptHit | None:
        [found] = await self._read([hit_id])
        return found

    async def _read(self, ids: Sequence[str]) -> list[KeptHit | None]:
        rows = await of_each(
            self._redis,
            ids,
            lambda pipe, name: pipe.hmget(self._record(name), "at", "tenant", "hit", "mark"),
        )
        return [_kept(name, *row) for name, row in zip(ids, rows, strict=True)]

    @reachable
    async def texts(self, ids: Sequence[str]) -> list[KeptText | None]:
        """Return the tokens around each of these hits; None where none are kept."""
        rows = await of_each(
            self._redis, ids, lambda pipe, name: pipe.hget(self._record(name), "text")
        )
        return [None if row is None else _text(from_msgpack(row, HitText)) for row in rows]

    @reachable
    async def mark(self, hit_id: str, mark: Mark | None) -> None:
        """Set the mark of a hit; None: take it back. Raises `not_found`, and `quota_exceeded` at
        the most marked hits that are kept.
        """
        kept = self._settings.hits_kept
        outcome = await self._own.hits_mark(
            args=pack(
                now(),
                policy=self._policy,
                id=hit_id,
                mark=None if mark is None else to_json(mark),
                kept=kept,
            )
        )
        if outcome == b"unknown":
            raise not_found(hit_id)
        if outcome == b"full":
            raise MidstreamError(
                "conflict",
                f"{kept} hits of this policy are marked, and no more are kept (hits_kept)",
                hint="export the marks, then take some back",
            )
        await self._ledger.written()

    @reachable
    async def precision(self, wanted: Callable[[KeptHit], bool]) -> list[VersionPrecision]:
        """Return what the marks of wanted hits say of each version, newest first."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.zrange(self._listed, 0, -1).zrange(self._unmarked, 0, -1)
            listed, unmarked = await pipe.execute()
        ids = [name.decode() for name in sorted({*listed} - {*unmarked})]
        counts: dict[int, Counter[HitVerdict]] = {}
        for first in range(0, len(ids), AT_ONCE):
            for found in await self._read(ids[first : first + AT_ONCE]):
                if found is not None and found.mark is not None and wanted(found):
                    counts.setdefault(found.hit.version, Counter())[found.mark.verdict] += 1
        return [_precision(version, counts[version]) for version in sorted(counts, reverse=True)]

    @reachable
    async def forget_texts(self, wanted: Callable[[KeptHit], bool]) -> int:
        """Delete the texts of wanted hits; return how many there were."""
        ids = [name.decode() for name in await self._redis.zrange(self._listed, 0, -1)]
        deleted = 0
        for first in range(0, len(ids), AT_ONCE):
            found = await self._read(ids[first : first + AT_ONCE])
            names = [self._record(hit.id) for hit in found if hit is not None and wanted(hit)]
            deleted += sum(
                await of_each(self._redis, names, lambda pipe, name: pipe.hdel(name, "text"))
            )
        return deleted


async def forget_texts(ledger: Ledger, model: str, wanted: Callable[[KeptHit], bool]) -> int:
    """Delete the texts of wanted hits of all policies of a model; return how many there were."""
    deleted = 0
    for policy in await Registry(ledger, POLICIES).names(model):
        deleted += await LedgerHits(ledger, model, policy).forget_texts(wanted)
    await ledger.written()
    return deleted


def not_found(hit_id: str) -> MidstreamError:
    return MidstreamError("not_found", f"unknown hit {hit_id}, or it is no longer kept")


def job_of(hit_id: str) -> str:
    """Return the job of a hit."""
    return hit_id.rpartition("_")[0]


def _kept(
    hit_id: str, at: bytes | None, tenant: bytes, hit: bytes, mark: bytes | None
) -> KeptHit | None:
    if at is None:  # it has expired
        return None
    return KeptHit(
        id=hit_id,
        at=float(at),
        tenant=tenant.decode(),
        hit=from_msgpack(hit, StoredHit),
        mark=None if mark is None else from_json(mark, Mark),
    )


def _text(stored: HitText) -> KeptText:
    ids = np.frombuffer(stored.token_ids, "<i4").tolist()
    return KeptText(ids, stored.first, stored.prompt_tokens)


def _precision(version: int, counts: Counter[HitVerdict]) -> VersionPrecision:
    right = counts["right"]
    decided = right + counts["false_alarm"]
    return VersionPrecision(
        version=version,
        right=right,
        false_alarm=counts["false_alarm"],
        unsure=counts["unsure"],
        precision=right / decided if decided else None,
    )
