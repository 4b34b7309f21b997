"""State of one fake rank: vectors, source runs, modules, global steering, rows in use, and a real
action ledger.

It answers the same calls as a real rank (`runner.vllm.worker_class`), so that the worker's code for
ranks runs unchanged.
"""

import functools
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from midstream.schemas.base.records import to_msgpack
from midstream.schemas.base.tensors import Tensor
from midstream.schemas.requests.source_runs import ZEROS, RunFiles, is_row, parse_row
from midstream.schemas.requests.specs import DIMS_PREFIX, ONES, RankSpec, StoredSteering
from midstream.schemas.requests.steering import GlobalSteering, SteeringTemplate
from midstream.schemas.settings.settings import Settings
from midstream.workers.runner.base.actions import ActionKind, ActionLedger

from .model import HIDDEN_SIZE

Answer = tuple[bool, str]
_FINE: Answer = (True, "")


class FakeFaults:
    """`name:key=value,key=value`, several separated by semicolons.

    `rank=R`: on that rank only; `times=N`: so often; `after=N`: later.
    """

    def __init__(self, text: str) -> None:
        self._known: dict[str, dict[str, str]] = {}
        self.switch(text)

    def switch(self, text: str) -> None:
        """Have these faults from now on."""
        parts = [part.partition(":") for part in text.split(";") if part]
        self._known = {
            name: dict(pair.split("=", 1) for pair in rest.split(",") if pair)
            for name, _, rest in parts
        }

    def get(self, name: str) -> dict[str, str] | None:
        """The fault's arguments; None when there is no such fault."""
        return self._known.get(name)

    def rank(self, name: str) -> int | None:
        """The rank that has the fault."""
        result = self._known.get(name)
        return int(result["rank"]) if result is not None else None

    def strikes(self, name: str, rank: int) -> bool:
        """Return whether the fault happens on this rank now. Counts against `times`."""
        result = self._known.get(name)
        if result is None or int(result.get("rank", rank)) != rank or result.get("times") == "0":
            return False
        if result.get("after", "0") != "0":
            result["after"] = str(int(result["after"]) - 1)
            return False
        if "times" in result:
            result["times"] = str(int(result["times"]) - 1)
        return True


def _failing(fault: str) -> Callable[[Callable[..., Answer]], Callable[..., Answer]]:
    """A rank that has the fault refuses the call."""

    def wrap(call: Callable[..., Answer]) -> Callable[..., Answer]:
        @functools.wraps(call)
        def called(rank: "FakeRank", *args: Any) -> Answer:
            if rank._faults.strikes(fault, rank.rank):
                return False, "injected fault"
            return call(rank, *args)

        return called

    return wrap


class FakeRank:
    """Rank `rank`, at place `tp` of stage `pp`."""

    def __init__(self, rank: int, tp: int, pp: int, settings: Settings, faults: FakeFaults) -> None:
        self.rank = rank
        self.tp = tp
        self.pp = pp
        self.ledger = ActionLedger()
        self.step = 0
        #: A real rank's figures of the scheduler, its writer and its outbox.
        self.load: dict[str, float] = {"outbox": 0, "backlog": 0}
        self.vectors: dict[str, list[int]] = {}  # name → shape
        self.runs: dict[str, RunFiles] = {}  # by key; the rows themselves are not read
        self.loras: dict[int, str] = {}  # number → digest
        self.saes: set[str] = set()  # digests
        self._rows: Counter[str] = Counter()
        self._live: dict[str, list[str]] = {}  # request → keys of its rows
        self._settings = settings
        self._faults = faults

    # What the worker calls, by these names

    def midstream_put_vectors(self, vectors: dict[str, Any], users: list[Any]) -> Answer:
        if self._faults.strikes("hold", self.rank):
            return False, f"refused vector {min(vectors)[:12]}: injected fault"
        tensors = msgspec.convert(vectors, dict[str, Tensor])
        self.vectors |= {name: tensor.shape for name, tensor in tensors.items()}
        return _FINE

    @_failing("drop")
    def midstream_drop_vectors(self, names: list[str]) -> Answer:
        for name in names:
            self.vectors.pop(name, None)
        return _FINE

    @_failing("put_run")
    def midstream_put_run(self, run: dict[str, Any]) -> Answer:
        files = msgspec.convert(run, RunFiles)
        if files.hidden_size != HIDDEN_SIZE:
            return False, (
                f"run {files.key}: its rows have {files.hidden_size} elements, but the model's "
                f"have {HIDDEN_SIZE}"
            )
        self.runs[files.key] = files
        return _FINE

    @_failing("drop_runs")
    def midstream_drop_runs(self, keys: list[str]) -> Answer:
        for key in keys:
            self.runs.pop(key, None)
        return _FINE

    @_failing("put_lora")
    def midstream_put_lora(self, number: int, digest: str, folder: str) -> Answer:
        self.loras[number] = digest
        return _FINE

    def midstream_drop_loras(self, numbers: list[int]) -> Answer:
        for number in numbers:
            self.loras.pop(number, None)
        return _FINE

    @_failing("put_sae")
    def midstream_put_sae(self, digest: str, hook: str, layer: int, folder: str) -> Answer:
        self.saes.add(digest)
        return _FINE

    def midstream_drop_saes(self, digests: list[str]) -> Answer:
        self.saes.difference_update(digests)
        return _FINE

    @_failing("check_global")
    def midstream_check_global(self, steering: dict[str, Any]) -> Answer:
        return self._fits(msgspec.convert(steering, GlobalSteering).entries)

    @_failing("restart")
    def midstream_restart_ledger(self) -> Answer:
        self.ledger.restart()
        self.vectors = {}
        self.runs = {}
        self._rows = Counter()
        self._live = {}
        return _FINE

    def midstream_fingerprint(self) -> str:
        has = (
            sorted(self._rows.items()),
            sorted(self.vectors),
            sorted(self.runs),
        )
        other = self._faults.strikes("fingerprint", self.rank)
        return f"{zlib.crc32(to_msgpack(has), int(other)):08x}"

    def midstream_status(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "tp": self.tp,
            "pp": self.pp,
            "step": self.step,
            "checksum": self.ledger.checksum,
            "actions": self.ledger.count,
            "epoch": self.ledger.epoch,
            "rows_used": len(self._rows),
            "rows": self._settings.tuning.table_rows,
            "entries_used": len(self._rows),
            "entries": self._settings.tuning.table_entries,
            "vectors": len(self.vectors),
            "runs": len(self.runs),
            "requests": len(self._live),
            **self.load,
        }

    # Requests

    def begin(self, spec: RankSpec) -> Answer:
        """A request that is steered begins: its rows, then itself, are accounted for."""
        fits, why = self._fits(list(spec.steering))
        if not fits:
            return fits, why
        self._live[spec.key] = [row.key for row in spec.rows]
        for row in self._live[spec.key]:
            self._rows[row] += 1
            if self._rows[row] == 1:
                self._fold("row_admit", row, 0)
        if spec.lora is not None:
            if spec.lora.digest not in self.loras.values():
                return False, f"adapter {spec.lora.digest[:12]} is not loaded"
            self._fold("lora", spec.job, spec.request, spec.attempt, spec.lora.digest)
        if spec.steering:
            self._fold("steer", spec.job, spec.request, spec.attempt, spec.digest)
        return _FINE

    def end(self, spec: RankSpec) -> None:
        """The request is over; one from before a reset of the ledger is already forgotten."""
        for row in self._live.pop(spec.key, []):
            self._rows[row] -= 1
            if not self._rows[row]:
                del self._rows[row]
                self._fold("row_release", row)

    def _fits(self, entries: list[SteeringTemplate] | list[StoredSteering]) -> Answer:
        for entry in entries:
            for name, shape in zip(entry.tensors, entry.shapes(HIDDEN_SIZE), strict=True):
                if name in (ZEROS, ONES) or name.startswith(DIMS_PREFIX):
                    continue
                if is_row(name):
                    if lacking := self._lacks(name):
                        return False, lacking
                    continue
                if name not in self.vectors:
                    return False, f"vector {name[:12]} is not on this rank"
                if self.vectors[name] != shape:
                    return (
                        False,
                        f"vector {name[:12]}: its shape is {self.vectors[name]}; {shape} is needed",
                    )
        return _FINE

    def _lacks(self, name: str) -> str:
        """Return why there is no such row of a source run; empty when there is one."""
        row = parse_row(name)
        run = self.runs.get(row.key)
        if run is None or self._faults.strikes("lose_run", self.rank):
            return f"source run {row.key} is not on this rank"
        if row.layer not in run.sites.get(row.hook, ()):
            return f"source run {row.key} has no rows of {row.hook} of layer {row.layer}"
        missing = set(row.mean if row.position is None else (row.position,)) - set(run.positions)
        return f"source run {row.key} has no row at position {min(missing)}" if missing else ""

    def _fold(self, kind: ActionKind, *content: str | int) -> None:
        if kind == "steer" and self._faults.strikes("desync", self.rank):
            return
        self.ledger.fold(self.step, kind, *content)
