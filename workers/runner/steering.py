"""Which vectors are on this rank, and which rows of the steering tables do live requests use?"""

from collections.abc import Sequence

import torch

from ...schemas.specs import SteeringRow
from ...schemas.tensors import Tensor, content_hash, to_numpy
from .sites import Site


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


class RowTable:
    """Rows of all sites' tables, keyed by content and reference-counted. Row 0 stays zero."""

    def __init__(self, sites: Sequence[Site], rows: int, vectors: VectorStore) -> None:
        self._sites = {site.layer: site for site in sites}
        self._vectors = vectors
        self._free = list(range(rows, 0, -1))
        self._rows: dict[str, int] = {}
        self._references: dict[str, int] = {}
        self._layers: dict[int, frozenset[int]] = {}

    @property
    def used(self) -> int:
        return len(self._rows)

    def layers(self, row: int) -> frozenset[int]:
        """The layers of this rank that a row in use edits."""
        return self._layers[row]

    def acquire(self, spec: SteeringRow) -> tuple[int, bool]:
        """The row that holds `spec`'s content, and whether it was written now.

        Raises LookupError for an unknown vector and RuntimeError when all rows are taken (the worker admits no more
        configurations than there are rows, so that means a bug and fails the request, not the engine).
        """
        if spec.key in self._rows:
            self._references[spec.key] += 1
            return self._rows[spec.key], False
        content = self._content(spec)
        if not self._free:
            raise RuntimeError(f"all {len(self._rows)} steering rows are in use")
        row = self._free.pop()
        for layer, values in content.items():
            table = self._sites[layer].table
            table[row] = values.to(table.dtype)
        self._rows[spec.key], self._references[spec.key] = row, 1
        self._layers[row] = frozenset(content)
        return row, True

    def release(self, key: str) -> bool:
        """Give back one reference; True when the row became free (it is zeroed)."""
        self._references[key] -= 1
        if self._references[key]:
            return False
        row = self._rows.pop(key)
        del self._references[key]
        for layer in self._layers.pop(row):
            self._sites[layer].table[row] = 0
        self._free.append(row)
        return True

    def _content(self, spec: SteeringRow) -> dict[int, torch.Tensor]:
        """Layer of this rank → sum of scale · vector over the entries that name it, float32."""
        content: dict[int, torch.Tensor] = {}
        for entry in spec.entries:
            scaled = self._vectors.get(entry.vector) * entry.scale
            for layer in entry.layers:
                if layer in self._sites:
                    content[layer] = content[layer] + scaled if layer in content else scaled
        return content
