"""Next-token grades of the fake engine: a function of tokens and edited rows, so that a wrong patch
shows.

An edit that leaves a row unchanged has no effect: so a patch with a prompt's own row changes
nothing here, either.
"""

import zlib
from collections.abc import Callable, Sequence

import numpy as np

from midstream.schemas.base.records import to_msgpack
from midstream.schemas.prompts.selectors import Hook, select
from midstream.schemas.requests.source_runs import ZEROS, RunFiles, RunRow, is_row, parse_row
from midstream.schemas.requests.specs import RankSpec, StoredSteering
from midstream.storage.formats.capture_blobs import DamagedBlob, read_header
from midstream.storage.store import ArtifactStore

from .model import HIDDEN_SIZE, residual_rows

#: (hook, layer, position) and what stands there: a row's bytes, or what would be done to it.
Edit = tuple[str, int, int, bytes]


class Ungradable(Exception):
    """The request's grade is undefined; the text gives the reason."""


def expected_logprob(token_ids: Sequence[int], edits: Sequence[Edit], token: int) -> float:
    """Return the log-probability of `token` behind `token_ids`, nats: a number in (−10, 0)."""
    return -(zlib.crc32(to_msgpack((list(token_ids), sorted(edits), token))) % 9_999 + 1) / 1000


def expected_divergence(
    first: tuple[Sequence[int], Sequence[Edit]], second: tuple[Sequence[int], Sequence[Edit]]
) -> float:
    """Return the divergence between the expectations behind two prompts under their edits, nats:
    0 where they are the same.
    """
    report = [to_msgpack((list(token_ids), sorted(edits))) for token_ids, edits in (first, second)]
    return 0.0 if report[0] == report[1] else (zlib.crc32(b"".join(report)) % 4_999 + 1) / 1000


def own_row(
    hook: str, layer: int, position: int, token_ids: Sequence[int], weights: int = 0
) -> np.ndarray:
    """`[HIDDEN_SIZE]` float32: what stands there without an edit."""
    own: np.ndarray = residual_rows(
        layer, np.array([position]), np.array([token_ids[position]]), hook, weights
    )[0]
    return own


def replaced(
    hook: str,
    layer: int,
    position: int,
    token_ids: Sequence[int],
    row: np.ndarray,
    alpha: float = 1.0,
    weights: int = 0,
) -> list[Edit]:
    """The edit that writes `row` there; none where it is what stands there anyway."""
    own = own_row(hook, layer, position, token_ids, weights)
    new = (
        row.astype(np.float32)
        if alpha == 1.0
        else ((1 - alpha) * own.astype(np.float64) + alpha * row).astype(np.float32)
    )
    return [] if (new == own).all() else [(hook, layer, position, new.tobytes())]


class FakeGrades:
    """Grades requests as the last stage's first rank does.

    `runs()`: the source runs that the ranks have, by key.
    """

    def __init__(
        self, store: ArtifactStore, runs: Callable[[], dict[str, RunFiles]], weights: int = 0
    ) -> None:
        self._store = store
        self._runs = runs
        self._weights = weights
        self._kept: dict[str, tuple[Sequence[int], Sequence[Edit]]] = {}
        self._read: dict[str, dict[tuple[str, int], np.ndarray]] = {}

    def of(self, spec: RankSpec, token_ids: Sequence[int]) -> list[float]:
        """The grades that `spec.grade` requests. Raises Ungradable."""
        grade = spec.grade
        if grade is None:
            return []
        edits = [edit for entry in spec.steering for edit in self._edits(entry, token_ids)]
        if spec.entry is not None:
            self._check_entry(spec.entry.run, spec.entry.layer, token_ids, edits)
        if grade.keep:
            self._kept[grade.keep] = token_ids, edits
        values = [expected_logprob(token_ids, edits, token) for token in grade.token_ids]
        if grade.against:
            if grade.against not in self._kept:
                raise Ungradable(
                    f"the reference distribution {grade.against!r} is no longer stored"
                )
            values.append(expected_divergence(self._kept[grade.against], (token_ids, edits)))
        return values

    def _edits(self, entry: StoredSteering, token_ids: Sequence[int]) -> list[Edit]:
        edits: list[Edit] = []
        for position in select(entry.positions, 0, len(token_ids), len(token_ids)):
            for layer in entry.layers:
                name = entry.tensors[0]
                if entry.family == "replace" and (name == ZEROS or is_row(name)):
                    row = (
                        np.zeros(HIDDEN_SIZE, np.float32)
                        if name == ZEROS
                        else self._row(parse_row(name))
                    )
                    edits += replaced(
                        entry.hook,
                        layer,
                        position,
                        token_ids,
                        row,
                        alpha=entry.numbers[0],
                        weights=self._weights,
                    )
                else:
                    edits.append(
                        (
                            entry.hook,
                            layer,
                            position,
                            to_msgpack((entry.family, entry.tensors, entry.numbers, entry.scale)),
                        )
                    )
        return edits

    def _row(self, row: RunRow) -> np.ndarray:
        rows, positions = self._rows(row.key, row.hook, row.layer)
        if row.position is not None:
            of_one: np.ndarray = rows[positions.index(row.position)]
            return of_one
        chosen = rows[[positions.index(place) for place in row.mean]] if row.mean else rows
        mean: np.ndarray = chosen.astype(np.float64).mean(0).astype(np.float32)
        return mean

    def _check_entry(
        self, run: str, layer: int, token_ids: Sequence[int], edits: Sequence[Edit]
    ) -> None:
        """Check as a rank that begins there: with rows of the very same tokens, and nothing
        edited below.
        """
        rows, positions = self._rows(run, "pre_attn", layer)
        if positions != list(range(len(token_ids))):
            raise Ungradable(f"source run {run} does not have all positions of the prompt")
        own = residual_rows(
            layer, np.arange(len(token_ids)), np.array(token_ids), "pre_attn", self._weights
        )
        if not (rows == own).all():
            raise Ungradable(f"source run {run} has different tokens")
        if below := [edit for edit in edits if edit[1] < layer]:
            raise Ungradable(
                f"layer {below[0][1]} is edited below layer {layer}, where the forward pass begins"
            )

    def _rows(self, key: str, hook: Hook, layer: int) -> tuple[np.ndarray, list[int]]:
        """`[positions, HIDDEN_SIZE]`, and which positions these are."""
        run = self._runs().get(key)
        if run is None:
            raise Ungradable(f"source run {key} is not on this rank")
        try:
            if key not in self._read:
                self._read[key] = self._load(run)
            return self._read[key][hook, layer], run.positions
        except KeyError:
            raise Ungradable(f"source run {key} has no rows of {hook} of layer {layer}") from None
        except (OSError, DamagedBlob) as error:
            raise Ungradable(f"source run {key} cannot be read: {error}") from error

    def _load(self, run: RunFiles) -> dict[tuple[str, int], np.ndarray]:
        rows = {}
        for file in run.files:
            with self._store.open(file.path) as handle:
                raw = handle.read(file.offset, file.bytes)
            header = read_header(
                lambda start, count, raw=raw: raw[start : start + count],  # type: ignore[misc]
                len(raw),
            )
            for place in header.tensors.values():
                if place.site is not None:
                    values = np.frombuffer(raw, np.float32, place.length // 4, place.start)
                    rows[place.site] = values.reshape(place.shape)
        return rows
