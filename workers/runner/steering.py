"""Which vectors are on this rank, and which rows of the steering tables do live requests use?"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...kernels.families import PLACE
from ...schemas.specs import SteeringRow
from ...schemas.tensors import Tensor, content_hash, to_numpy
from .sites import Buffers, Site


class VectorStore:
    """Steering vectors by content hash, `[hidden_size]` float32 on the CPU."""

    def __init__(self, hidden_size: int) -> None:
        self._hidden_size = hidden_size
        self._vectors: dict[str, torch.Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._vectors

    def __len__(self) -> int:
        return len(self._vectors)

    def put(self, name: str, tensor: Tensor) -> None:
        """Raises ValueError when the bytes are not what `name` says, the width is wrong or a value is not finite."""
        if content_hash(tensor) != name:
            raise ValueError(f"vector {name[:12]}: its bytes have another hash")
        if tensor.shape != [self._hidden_size]:
            raise ValueError(f"vector {name[:12]}: shape {tensor.shape}, the model needs [{self._hidden_size}]")
        values = torch.from_numpy(to_numpy(tensor).astype("float32"))
        if not bool(torch.isfinite(values).all()):
            raise ValueError(f"vector {name[:12]}: has values that are not finite")
        self._vectors[name] = values

    def drop(self, name: str) -> None:
        self._vectors.pop(name, None)

    def get(self, name: str) -> torch.Tensor:
        """Raises LookupError when the vector was never sent to this rank."""
        if name not in self._vectors:
            raise LookupError(f"vector {name[:12]} is not on this rank")
        return self._vectors[name]


@dataclass
class _Content:
    """What a row does at one site, in one family. `vector`: `[hidden_size]` float32."""

    vector: torch.Tensor
    scalars: tuple[float, ...] = ()


class RowTable:
    """Configuration rows, keyed by content and reference-counted. Each edited site takes one entry of the pool.

    Row 0 and entry 0 stay zero: they mean "do nothing".
    """

    def __init__(self, sites: Sequence[Site], buffers: Buffers, vectors: VectorStore) -> None:
        self._numbers = {(site.hook, site.layer): number for number, site in enumerate(sites)}
        self._buffers = buffers
        self._vectors = vectors
        self._free_rows = list(range(buffers.site_rows.shape[2] - 1, 0, -1))
        self._free_entries = list(range(len(buffers.pool) - 1, 0, -1))
        self._rows: dict[str, int] = {}
        self._references: dict[str, int] = {}
        self._entries: dict[int, list[tuple[int, int, int]]] = {}  # row → (site, family, entry)
        self._sites: dict[int, np.ndarray] = {}  # row → bool [sites]

    @property
    def used(self) -> int:
        return len(self._rows)

    @property
    def entries_used(self) -> int:
        return len(self._buffers.pool) - 1 - len(self._free_entries)

    def sites(self, row: int) -> np.ndarray:
        """Which sites of this rank a row in use edits: bool `[sites]`."""
        return self._sites[row]

    def acquire(self, spec: SteeringRow) -> tuple[int, bool]:
        """The row that holds `spec`'s content, and whether it was written now.

        Raises LookupError for an unknown vector, ValueError when entries add up to what is not finite, RuntimeError when all
        rows or entries are taken (the worker admits no more configurations than fit, so that means a bug and fails the
        request, not the engine).
        """
        if spec.key in self._rows:
            self._references[spec.key] += 1
            return self._rows[spec.key], False
        content = self._content(spec)
        if not self._free_rows or len(self._free_entries) < len(content):
            raise RuntimeError(f"all steering rows are in use ({self.used} rows, {self.entries_used} entries)")
        row = self._free_rows.pop()
        self._rows[spec.key], self._references[spec.key] = row, 1
        places = [(site, family, self._free_entries.pop()) for site, family in content]
        self._entries[row], self._sites[row] = places, np.zeros(len(self._numbers), dtype=bool)
        self._sites[row][[site for site, _, _ in places]] = True
        self._write(row, places, content)
        return row, True

    def _write(self, row: int, places: list[tuple[int, int, int]], content: dict[tuple[int, int], _Content]) -> None:
        """One copy for all sites: on an accelerator each one waits."""
        if not places:  # all its layers are on other stages
            return
        buffers, device = self._buffers, self._buffers.pool.device
        sites, families, entries = (torch.tensor(column, device=device) for column in zip(*places, strict=True))
        scalars = torch.zeros(len(places), buffers.scalars.shape[1])
        for number, does in enumerate(content.values()):
            scalars[number, : len(does.scalars)] = torch.tensor(does.scalars)
        buffers.pool[entries] = torch.stack([does.vector for does in content.values()]).to(buffers.pool.dtype).to(device)
        buffers.scalars[entries] = scalars.to(device)
        buffers.site_rows[sites, families, row] = entries.to(torch.int32)

    def release(self, key: str) -> bool:
        """Give back one reference; True when the row became free (it is zeroed)."""
        self._references[key] -= 1
        if self._references[key]:
            return False
        row = self._rows.pop(key)
        del self._references[key], self._sites[row]
        places = self._entries.pop(row)
        self._buffers.site_rows[:, :, row] = 0
        if places:
            entries = torch.tensor([entry for _, _, entry in places], device=self._buffers.pool.device)
            self._buffers.pool[entries] = 0
            self._buffers.scalars[entries] = 0
            self._free_entries += entries.tolist()
        self._free_rows.append(row)
        return True

    def _content(self, spec: SteeringRow) -> dict[tuple[int, int], _Content]:
        """(site of this rank, family) → what the row does there: its entries, joined in the order written."""
        content: dict[tuple[int, int], _Content] = {}
        for entry in spec.entries:
            vector = self._vectors.get(entry.vector) * entry.scale
            for layer in entry.layers:
                number = self._numbers.get((entry.hook, layer))
                if number is not None:
                    place = number, PLACE[entry.op]
                    content[place] = _JOINED[entry.op](content.get(place), vector, entry.alpha)
        for (site, _), does in content.items():
            if not bool(torch.isfinite(does.vector.to(self._buffers.pool.dtype)).all()):
                raise ValueError(f"the entries for site {site} add up to more than {self._buffers.pool.dtype} holds")
        return content


def _joined_add(before: _Content | None, vector: torch.Tensor, alpha: float) -> _Content:
    return _Content(vector if before is None else before.vector + vector)


def _joined_replace(before: _Content | None, vector: torch.Tensor, alpha: float) -> _Content:
    """One replacement after another is one replacement: s → (1−a)·((1−b)·s + b·u) + a·t."""
    if before is None or alpha == 1.0:
        return _Content(vector, (alpha,))
    kept = (1.0 - alpha) * before.scalars[0]
    joined = kept + alpha
    return _Content((kept * before.vector + alpha * vector) / joined if joined else vector, (joined,))


_JOINED = {"add": _joined_add, "replace": _joined_replace}
