"""Values of one pair's units, from what the ranks reported."""

import asyncio
from collections.abc import Sequence

from msgspec.structs import replace

from midstream.schemas.jobs.receipts import Receipt

from ..records.sweeps import SHOWN_NEURONS, StoredSweep, Unit, UnitRecord
from ..results.sweep_metrics import grades, in_nats, recovered, useless_baseline
from .records import SweepRecords
from .requests import SweepRequests
from .verdict import graded, unverified


class PairValues:
    """The metric of a pair's prompts, and with it the values of the pair's cells."""

    def __init__(
        self, sweep: StoredSweep, requests: SweepRequests, records: SweepRecords, world: int
    ) -> None:
        self._sweep = sweep
        self._requests = requests
        self._records = records
        self._world = world
        self._recovers = sweep.metric == "recovered"
        self._base: float | None = None  # the metric in nats, of the base prompt without a patch
        self._source: float | None = None  # the same of the source prompt
        self._noise: list[float] = []  # the same of the base prompt with no-op patches
        self._noise_left = 0  # noise units without a record
        self._noise_known = asyncio.Event()  # none is left
        self.useless = ""  # why `recovered` cannot be computed

    def await_noise(self, units: int) -> None:
        """Have cells of `recovered` wait for this many noise units."""
        self._noise_left = units
        if not units:
            self._noise_known.set()

    def take_in(self, units: Sequence[Unit], noise: Sequence[Unit]) -> str:
        """Set the baseline from the records of the pair's prompts, and of the noise units that have
        some. Returns why the pair gets no values, or "".
        """
        known = self._records.known
        for unit in units:
            if unit.kind == "base":
                self._base = known[unit.number].value
            else:
                self._source = known[unit.number].value
        if self._recovers:
            if self._base is None or self._source is None:
                return "there is no second prompt to compare with"
            shares = [known[unit.number].value for unit in noise if unit.number in known]
            self._noise += [
                self._base + share * (self._source - self._base)
                for share in shares
                if share is not None
            ]
            self._judge()
        return ""

    def _judge(self) -> None:
        assert self._base is not None
        assert self._source is not None
        self.useless = useless_baseline(self._base, self._source, self._noise)

    async def record(self, unit: Unit, report: list[list[Receipt]], reason: str) -> UnitRecord:
        """Return a unit's record, once the units that its value depends on have theirs.

        `report`: for each request, the receipts of all ranks. `reason`: why it has no value.
        """
        reason = reason or unverified(report, self._world)
        if unit.kind == "sender":  # a first pass has no value
            receipts = [receipt for receipts in report for receipt in receipts]
            return replace(self._records.new(unit, reason), receipts=receipts)
        if unit.kind == "cell" and self._recovers and not self.useless:
            await self._noise_known.wait()
        record = self._records.new(unit, reason) if reason else self._value(unit, report)
        if unit.kind == "noise":
            self._noise_left -= 1
            if not self._noise_left:
                if self._recovers:
                    self._judge()
                self._noise_known.set()
        return record

    def _value(self, unit: Unit, report: list[list[Receipt]]) -> UnitRecord:
        stored = self._sweep.pairs[unit.pair]
        nodes = self._requests.units.nodes[unit.pair]
        reported = [graded(receipts) for receipts in report]
        try:
            found = grades(stored, nodes, reported, self._requests.compares(unit))
            reference = self._sweep.metric == "kl" and unit == self._requests.reference(unit.pair)
            value = 0.0 if reference else in_nats(self._sweep.metric, found)
        except ValueError as error:
            return self._records.new(unit, str(error))
        if unit.kind == "noise":
            self._noise.append(value)
        if unit.kind in ("cell", "noise") and self._recovers:
            assert self._base is not None
            assert self._source is not None
            if self.useless:
                return self._records.new(unit, self.useless)
            value = recovered(value, self._base, self._source)
        return replace(
            self._records.new(unit),
            value=value,
            logprob=found.logprob,
            foil_logprob=found.foil_logprob,
            neurons=self._requests.neurons(unit)[:SHOWN_NEURONS] if unit.kind == "cell" else [],
            receipts=[receipt for receipts in report for receipt in receipts]
            if unit.kind in ("base", "source")
            else [],
        )
