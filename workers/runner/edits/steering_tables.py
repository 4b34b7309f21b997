"""Steering vectors of this rank, and the rows of its steering table."""

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import numpy as np
import torch

from ....kernels.plan import Buffers, Does, does_of, laid_out
from ....schemas.base.tensors import Tensor, content_hash, to_numpy
from ....schemas.requests.interventions import FAMILIES, FAMILY, PLACE, OpFamily
from ....schemas.requests.source_runs import ZEROS, is_row
from ....schemas.requests.specs import (
    DIMS_PREFIX,
    LIMIT,
    ONES,
    SteeringRow,
    StoredSteering,
    dims_named,
)
from ..base.actions import ActionLedger
from ..base.host_memory import locked_copy
from ..files.finished_rows import BankColumns
from ..hooks.sites import RankSite
from .prepared_rows import PreparedRows
from .source_runs import RunStore
from .vector_pool import EntryPool, JoinedRow, RowContent, joined


class VectorStore:
    """Steering tensors by content hash, float32 on the CPU: vectors, and the matrices and biases of
    the family `lowrank`.
    """

    def __init__(self) -> None:
        self._vectors: dict[str, torch.Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._vectors

    def __len__(self) -> int:
        return len(self._vectors)

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Store tensors by content hash: all of them, or none if one is refused. Raises ValueError
        when its bytes do not match its name or a value is not finite.

        Shapes are checked at use.
        """
        new = tensors.keys() - self._vectors.keys()
        self._vectors.update({name: _values(name, tensors[name]) for name in sorted(new)})

    def names(self) -> list[str]:
        return sorted(self._vectors)

    def missing(self, names: set[str]) -> set[str]:
        """Return those of the names that stand for a tensor that this rank does not have."""
        unknown = names.difference(self._vectors, (ZEROS, ONES))
        return {name for name in unknown if not name.startswith(DIMS_PREFIX)}

    def drop(self, names: Sequence[str]) -> None:
        """Drop tensors. Also rolls back a `put` that failed on another rank.

        Storing a tensor is not recorded in the action ledger; writing a row that contains it is.
        Requests that are steered with it already have their rows.
        """
        for name in names:
            self._vectors.pop(name, None)

    def clear(self) -> None:
        self._vectors.clear()

    def get(self, name: str, shape: list[int]) -> torch.Tensor:
        """Return a tensor. Raises LookupError when this rank does not have it, ValueError when it
        has another shape.
        """
        values = self._vectors.get(name)  # one lookup: the thread that prepares rows calls this too
        if values is None:
            raise LookupError(f"vector {name[:12]} is not on this rank")
        if list(values.shape) != shape:
            raise ValueError(
                f"vector {name[:12]}: its shape is {list(values.shape)}; {shape} is needed"
            )
        return values


def _values(name: str, tensor: Tensor) -> torch.Tensor:
    if content_hash(tensor) != name:
        raise ValueError(f"vector {name[:12]}: its content does not match its hash")
    values = torch.from_numpy(to_numpy(tensor).astype("float32"))
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"vector {name[:12]}: has values that are not finite")
    return values


class RowTable:
    """Configuration rows, keyed by content and reference-counted.

    A row's effect at a site is stored in entries of the pool. Row 0 and entry 0 stay zero: they
    mean "do nothing".
    """

    def __init__(
        self,
        sites: Sequence[RankSite],
        buffers: Buffers,
        vectors: VectorStore,
        runs: RunStore,
        columns: BankColumns | None = None,
        prepared: PreparedRows | None = None,
    ) -> None:
        """`columns`: the columns of rows that this rank holds; None: all of the hidden size.
        `prepared`: rows that may be laid out already, see `Tables`.
        """
        #: This rank's columns, if ranks divide the rows.
        self._columns = columns if columns is not None and columns.sharded else None
        self._row_size = buffers.pool.shape[1] if columns is None else columns.row.size
        self._prepared = prepared
        self._buffers = buffers
        self._numbers = {(site.hook, site.layer): number for number, site in enumerate(sites)}
        self._vectors = vectors
        self._runs = runs
        self._pool = EntryPool(buffers)
        self._free_rows = self._all_rows()
        self._rows: dict[str, int] = {}
        self._references: dict[str, int] = {}
        #: bool [1 + configurations, sites]: which sites of this rank each row edits; int64 [1 +
        #: configurations]: how many.
        self.sites = np.zeros((buffers.site_rows.shape[2], len(sites)), dtype=bool)
        self.num_sites = np.zeros(len(self.sites), dtype=np.int64)
        #: bool [1 + configurations]: which rows have an edit with a limit.
        self.limited = np.zeros(len(self.sites), dtype=bool)
        # row → fingerprint of this rank's columns, and of whole rows
        self._whole: dict[int, tuple[int, int]] = {}

    @property
    def used(self) -> int:
        return len(self._rows)

    @property
    def entries_used(self) -> int:
        return self._pool.used

    def acquire(self, spec: SteeringRow) -> tuple[int, int | None]:
        """Return the row that holds `spec`'s content, and the CRC32 of the written bytes; None if
        the row was already written.

        Raises LookupError for a vector or a source run's row that this rank does not have,
        ValueError for one of another shape or entries whose sum is not finite, and RuntimeError
        when all rows or entries are taken (the worker admits no more configurations than fit, so
        this is a bug, which fails the request and not the engine).
        """
        if spec.key in self._rows:
            self._references[spec.key] += 1
            return self._rows[spec.key], None
        prepared = self.joined(spec) if self._prepared is None else self._prepared.get(spec)
        if not self._free_rows:
            raise RuntimeError(f"all {self.used} steering rows are in use")
        row = self._free_rows[-1]
        self._pool.write(row, prepared)
        self._free_rows.pop()
        self._rows[spec.key] = row
        self._references[spec.key] = 1
        self.sites[row, prepared.runs[:, 0]] = True
        self.num_sites[row] = self.sites[row].sum()
        self.limited[row] = any(map(LIMIT, spec.entries))
        if self._columns is not None:
            self._whole[row] = prepared.fingerprint(), prepared.crc32
        # The ledger records the bytes that were written, not their name: a rank that wrote other
        # bytes reports another checksum.
        return row, prepared.crc32

    def release(self, key: str) -> bool:
        """Release one reference; True if the row became free (it is zeroed)."""
        self._references[key] -= 1
        if self._references[key]:
            return False
        row = self._rows.pop(key)
        del self._references[key]
        self.sites[row] = self.num_sites[row] = 0
        self._whole.pop(row, None)
        self._pool.erase(row)
        self._free_rows.append(row)
        return True

    def clear(self) -> None:
        """Drop all rows, including held ones, and zero the buffers."""
        self._pool.clear()
        self._free_rows = self._all_rows()
        self.sites[:] = self.num_sites[:] = 0
        self._rows = {}
        self._references = {}
        self._whole = {}

    def fingerprint(self) -> list[tuple[str, int, int]]:
        """Return (key, references, CRC32 of what its sites read) of each row in use, and of row 0,
        whose key is empty. Waits for the device.
        """
        fingerprints = self._pool.fingerprints()
        for row, (value, whole) in self._whole.items():
            # unchanged since it was written: report the whole row, whose columns ranks divide
            if fingerprints[row] == value:
                fingerprints[row] = whole
        return [
            ("", 0, fingerprints[0]),
            *sorted(
                (key, self._references[key], fingerprints[row]) for key, row in self._rows.items()
            ),
        ]

    def _all_rows(self) -> list[int]:
        return list(range(self._buffers.site_rows.shape[2] - 1, 0, -1))

    def joined(self, spec: SteeringRow) -> JoinedRow:
        """Return the content of a row, ready to be written. Raises what `content` raises."""
        return self._join(self.content(spec))

    def _join(self, content: RowContent) -> JoinedRow:
        """Join `content`, which has whole rows; of sharded rows, only this rank's columns are kept
        for writing. The checksum covers whole rows, so that all ranks agree on it.
        """
        pool = self._buffers.pool
        columns = self._columns
        if columns is None:
            return joined(content, self._row_size, pool.dtype, pinned=pool.device.type != "cpu")
        whole = joined(content, self._row_size, pool.dtype, pinned=False)
        vectors = whole.vectors[:, columns.start : columns.stop]
        return whole._replace(
            vectors=locked_copy(vectors) if pool.device.type != "cpu" else vectors.contiguous()
        )

    def _check_alone(self, family: str, vectors: torch.Tensor) -> None:
        """Raises ValueError for vectors of a family that sums over columns, if several ranks hold
        nonzero columns: each rank would sum only its own.
        """
        if self._columns is None:
            return
        shards = torch.unique(torch.nonzero(vectors)[:, 1] // self._columns.size)
        if len(shards) > 1 or family == "add_matched":
            raise ValueError(
                f"{FAMILY[cast(OpFamily, family)].written} adds up columns of {len(shards)} "
                "tensor-parallel ranks: "
                f"its tensors must lie within {self._columns.size} columns, which one rank holds"
            )

    def content(self, spec: SteeringRow) -> RowContent:
        """Return (site of this rank, family) → the row's entries there: vectors in the pool's
        dtype, scalars float32.

        Raises LookupError for a vector or a source run's row that this rank does not have,
        ValueError for one of another shape. Tensors of an entry are looked up only if the entry has
        a site on this rank: a run's row exists only on its own stage.
        """
        does: dict[tuple[int, str], Does] = {}
        for entry in spec.entries:
            numbers = [
                number
                for layer in entry.layers
                if (number := self._numbers.get((entry.hook, layer))) is not None
            ]
            if not numbers:
                continue
            added = self._does(entry)
            # by earlier entry: most sites share it too, so each pair is joined once
            joined: dict[int, tuple[Does, Does]] = {}
            for number in numbers:
                before = does.get((number, entry.family))
                if before is not None and id(before) not in joined:
                    joined[id(before)] = before, _JOINED[entry.family](before, added)
                does[number, entry.family] = added if before is None else joined[id(before)][1]
        # most sites of an entry share one effect, which is laid out once
        laid: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        content = {}
        for (site, family), effect in does.items():
            if id(effect) not in laid:
                laid[id(effect)] = self._laid_out(family, effect)
            content[site, PLACE[family]] = laid[id(effect)]
        return content

    def _laid_out(self, family: str, does: Does) -> tuple[torch.Tensor, torch.Tensor]:
        vectors, scalars = laid_out(family, does)
        if FAMILY[cast(OpFamily, family)].sums:
            self._check_alone(family, vectors)
        vectors = vectors.to(self._buffers.pool.dtype)
        if not bool(torch.isfinite(vectors).all()):
            raise ValueError(
                f"the sum of the {family} entries exceeds the range of {self._buffers.pool.dtype}"
            )
        return vectors, scalars

    def _does(self, entry: StoredSteering) -> Does:
        """Return the effect of an entry, which is the same at each of its sites."""
        shapes = entry.shapes(self._row_size)
        tensors = [
            self._tensor(name, shape) for name, shape in zip(entry.tensors, shapes, strict=True)
        ]
        made = does_of(entry.family, entry.numbers, tensors, entry.scale)
        return made._replace(limit=entry.limit, operator=entry.owner == "operator")

    def _tensor(self, name: str, shape: list[int]) -> torch.Tensor:
        """Return the tensor that `name` stands for, float32 on the CPU."""
        if name == ZEROS:
            return torch.zeros(shape)
        if name == ONES:
            return torch.ones(shape)
        if name.startswith(DIMS_PREFIX):
            return _mask(name, shape)
        if not is_row(name):
            return self._vectors.get(name, shape)
        values = self._runs.row(name)
        if list(values.shape) != shape:
            raise ValueError(f"{name}: its shape is {list(values.shape)}; {shape} is needed")
        return values


def _mask(name: str, shape: list[int]) -> torch.Tensor:
    mask = torch.zeros(shape)
    for dims in dims_named(name):
        if dims.stop > shape[0]:
            raise ValueError(f"{name}: a row has {shape[0]} dimensions")
        mask[dims.start : dims.stop] = 1
    return mask


def _join_replacements(before: Does, then: Does) -> Does:
    """Join two replacements into one: s → (1−a)·((1−b)·s + b·u) + a·t."""
    alpha = float(then.scalars[0])
    kept = (1.0 - alpha) * float(before.scalars[0])
    if alpha == 1.0 or not kept:
        return then
    if not alpha:  # returned unchanged to keep its bits, such as the sign of a zero
        return before
    joined = kept + alpha
    return then._replace(
        vectors=(kept * before.vectors + alpha * then.vectors) / joined, scalars=(joined,)
    )


#: Family with `joined` (see `steering_rows`) → function that joins two successive entries into one.
_JOINED: dict[str, Callable[[Does, Does], Does]] = {
    "add": lambda before, then: then._replace(vectors=before.vectors + then.vectors),
    "replace": _join_replacements,
    "replace_masked": _join_replacements,  # with equal masks
}
assert _JOINED.keys() >= {family.name for family in FAMILIES if family.joined}


class Tables:
    """The row tables of all banks of a rank, whose changes are recorded in the ledger."""

    def __init__(self, actions: ActionLedger) -> None:
        self._actions = actions
        self.vectors = VectorStore()
        self._of_banks: dict[str, RowTable] = {}
        self.prepared = PreparedRows(
            lambda spec: self.of(spec).joined(spec),
            self.vectors.missing,
        )

    def add(
        self,
        bank: str,
        sites: Sequence[RankSite],
        buffers: Buffers,
        runs: RunStore,
        columns: BankColumns | None = None,
    ) -> RowTable:
        """Return the table of another bank, see `RowTable`."""
        self._of_banks[bank] = RowTable(sites, buffers, self.vectors, runs, columns, self.prepared)
        return self._of_banks[bank]

    def of(self, spec: SteeringRow) -> RowTable:
        """Return the table of a row. Raises ValueError for hooks that this rank does not serve."""
        if spec.bank not in self._of_banks:
            raise ValueError(f"hook {spec.entries[0].hook} is not served")
        return self._of_banks[spec.bank]

    @property
    def used(self) -> int:
        return sum(table.used for table in self._of_banks.values())

    @property
    def entries_used(self) -> int:
        return sum(table.entries_used for table in self._of_banks.values())

    def acquire(
        self, step: int, steering_rows: Sequence[SteeringRow]
    ) -> list[tuple[int, SteeringRow]]:
        """Return the rows of a request or of global steering, acquired as by `RowTable.acquire`:
        all of them, or none if one raises.
        """
        held: list[tuple[int, SteeringRow]] = []
        try:
            for spec in steering_rows:
                row, written = self.of(spec).acquire(spec)
                held.append((row, spec))
                if written is not None:
                    self._actions.fold(step, "row_admit", spec.key, written)
        except Exception:
            self.release(step, held)
            raise
        return held

    def release(self, step: int, held: Sequence[tuple[int, SteeringRow]]) -> None:
        for _, spec in held:
            if self.of(spec).release(spec.key):
                self._actions.fold(step, "row_release", spec.key)

    def clear(self) -> None:
        """Drop all rows, including held ones, and zero the buffers."""
        self.prepared.clear()
        for table in self._of_banks.values():
            table.clear()

    def fingerprint(self) -> list[tuple[str, int, int]]:
        """Return `RowTable.fingerprint` of all banks."""
        return [row for table in self._of_banks.values() for row in table.fingerprint()]
