"""Files of surveys: examples and figures of features, written whole and read by ranges.

Tensors, with F features, k examples and w = 2 · context + 1 tokens: `active` int64, `largest` and
`mean` float32 `[F]`; `values` float32, `documents` and `positions` int64 `[F, k]`; `tokens` int64
and `around` float32 `[F, k, w]`. Absent examples have document −1, absent tokens id −1. A
comparison has `other.active`, … of the second harvest, examples of one row (F = 1), and `kl`
float32, `kl_documents` and `kl_positions` int64 `[rows]`.
"""

from collections.abc import Mapping
from functools import cached_property

import numpy as np

from ..schemas.base.errors import MidstreamError
from ..schemas.jobs.surveys import (
    SURVEY_FORMAT,
    Example,
    FeatureFigures,
    SurveyEntry,
    SurveyOrder,
)
from .shards import shard_buffers, shard_tensors, tensor_bits
from .store import ArtifactStore

FIGURES = ("active", "largest", "mean")


def survey_key(job: str) -> str:
    return f"surveys/{job}.safetensors"


def write_survey(
    store: ArtifactStore, key: str, arrays: Mapping[str, np.ndarray], identity: Mapping[str, str]
) -> tuple[int, int]:
    """Write a survey's file; return its bytes and CRC32 once it is durable. Raises OSError."""
    kinds = {"i": "int64", "f": "float32"}
    tensors = [
        (name, kinds[array.dtype.kind], np.ascontiguousarray(array))
        for name, array in arrays.items()
    ]
    buffers, size, crc32 = shard_buffers(tensors, {"format": SURVEY_FORMAT, **identity})
    store.prepare()
    writer = store.writer()
    try:
        writer.append(key, buffers)
        writer.commit()
    except BaseException:
        writer.abort()
        raise
    return size, crc32


class Surveyed:
    """The result of a survey, read from the harvest's store. `entry` describes it."""

    def __init__(self, store: ArtifactStore, entry: SurveyEntry) -> None:
        """Raises OSError, DamagedBlob."""
        self.entry = entry
        self._handle = store.open(entry.key, hold=False)
        self._tensors = shard_tensors(self._handle)

    def __repr__(self) -> str:
        entry = self.entry
        against = f" against {entry.against}" if entry.against else ""
        return f"<Surveyed {entry.job}: {entry.rows} rows of {entry.harvest}{against}>"

    def array(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return rows `[start, stop)` of a tensor (see the module). Raises OSError, `not_found`."""
        if name not in self._tensors:
            raise MidstreamError(
                "not_found", f"the survey has no {name}", allowed=", ".join(self._tensors)
            )
        tensor = self._tensors[name]
        start, stop, _ = slice(start, stop).indices(tensor.shape[0])
        item = tensor.length // tensor.shape[0] if tensor.shape[0] else 0
        count = max(0, stop - start)
        return tensor_bits(self._handle.read(tensor.start + start * item, count * item), tensor)

    @cached_property
    def density(self) -> np.ndarray:
        """The share of the rows where each feature is active, float64 `[features]`."""
        return self.array("active") / max(1, self.entry.rows)

    @property
    def kl(self) -> np.ndarray:
        """The KL divergence of each row in nats, ordered by document and position."""
        return self.array("kl")

    def features(self, order: SurveyOrder | None = None, limit: int = 50) -> list[FeatureFigures]:
        """Return the features that have the most of a figure; by default of the density, in a
        comparison of its change.
        """
        sides = ["", "other."] if self.entry.against else [""]
        if not self.entry.features:
            return []
        found = [{name: self.array(side + name) for name in FIGURES} for side in sides]
        for side in found:
            side["density"] = side["active"] / max(1, self.entry.rows)
        name, _, change = (order or f"density{'_change' if len(sides) > 1 else ''}").partition("_")
        by = found[0][name]
        if change:
            if len(sides) == 1:
                raise MidstreamError(
                    "invalid_request",
                    f"{order} needs a comparison",
                    field="order",
                    allowed="density, largest, mean",
                )
            # a mean over all rows, so that a feature that was never active is comparable
            weights = [side["density"] if name == "mean" else 1.0 for side in found]
            by = abs(found[1][name] * weights[1] - by * weights[0])
        chosen = np.argsort(-by, kind="stable")[:limit].tolist()
        return [self._figures(found, feature) for feature in chosen]

    def feature(self, feature: int) -> FeatureFigures:
        """Return the figures of one feature. Raises `not_found`."""
        return self._figures(
            [
                {name: self._row(side + name, feature)[None] for name in FIGURES}
                | {"density": self._row(side + "active", feature)[None] / max(1, self.entry.rows)}
                for side in (["", "other."] if self.entry.against else [""])
            ],
            0,
            feature,
        )

    def examples(self, feature: int = 0) -> list[Example]:
        """Return the strongest examples of a feature, or of a comparison those of its KL
        divergence. Raises `not_found`.
        """
        documents, positions, values, tokens, around = (
            self._row(name, feature)
            for name in ("documents", "positions", "values", "tokens", "around")
        )
        result = []
        for place in np.flatnonzero(documents >= 0).tolist():
            present = np.flatnonzero(tokens[place] >= 0)
            result.append(
                Example(
                    document=int(documents[place]),
                    position=int(positions[place]),
                    value=float(values[place]),
                    positions=(positions[place] - self.entry.context + present).tolist(),
                    token_ids=tokens[place][present].tolist(),
                    values=around[place][present].tolist(),
                )
            )
        return result

    def close(self) -> None:
        self._handle.close()

    def _row(self, name: str, row: int) -> np.ndarray:
        rows = self._tensors[name].shape[0] if name in self._tensors else 0
        if not 0 <= row < rows:
            raise MidstreamError(
                "not_found", f"the survey has no feature {row}", allowed=f"0 to {rows - 1}"
            )
        found: np.ndarray = self.array(name, row, row + 1)[0]
        return found

    @staticmethod
    def _figures(
        sides: list[dict[str, np.ndarray]], row: int, feature: int | None = None
    ) -> FeatureFigures:
        """Return the figures of `row`; those of a second side as the `other` of the first."""
        other = None
        for side in reversed(sides):
            other = FeatureFigures(
                feature=row if feature is None else feature,
                density=float(side["density"][row]),
                largest=float(side["largest"][row]),
                mean=float(side["mean"][row]),
                other=other,
            )
        assert other is not None
        return other
