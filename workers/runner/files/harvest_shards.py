"""The consumer `harvest`: gathers the rows of a shard's sequences, and writes the shard when its
last sequence is in.

What the rank holds is bounded by the shards that the worker lets into the engine at a time. A shard
that cannot be written is dropped and reported; the worker has it computed again.
"""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from ....schemas.jobs.harvest_order import row_order
from ....schemas.jobs.receipts import CapturedFile
from ....schemas.requests.harvest_work import HARVEST, SCALED, SHARDS_AT_ONCE, HarvestPlace
from ....storage.shards import RAW, encoded_rows, shard_buffers, site_name
from ....storage.store import open_store
from .finished_rows import FinishedCapture, Outcome

logger = logging.getLogger(__name__)

LAYOUT = "shard"


@dataclass
class _Sequence:
    """The rows of one sequence: its keys int64 `[rows]`, and of each site the bits `[rows,
    width]`.
    """

    keys: dict[str, np.ndarray]
    rows: dict[str, np.ndarray]
    non_finite: int


@dataclass
class _Shard:
    """Received part of one stage's file."""

    place: HarvestPlace
    sites: dict[str, list[int]]
    dtype: str  # of the rows as they come
    pp: int
    parts: dict[int, _Sequence] = field(default_factory=dict)  # by the sequence's index


class Harvest:
    """One per rank, shared by its writer threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: (store, key) → part of the stage → what there is of its file. The one that grew last
        #: comes last.
        self._shards: dict[tuple[str, str], dict[str, _Shard]] = {}

    def consume(self, captures: Sequence[FinishedCapture]) -> list[Outcome]:
        """Raises nothing: what goes wrong with a shard is the outcome of the sequence that was its
        last.
        """
        outcomes = []
        for capture in captures:
            try:
                whole = self._add(capture)
                outcomes.append(
                    Outcome() if whole is None else Outcome(files=(_write(whole, capture),))
                )
            except OSError as error:
                outcomes.append(Outcome(error=str(error), away=True))
            except Exception as error:
                logger.exception("%s: its shard failed", capture)
                outcomes.append(Outcome(error=str(error) or repr(error)))
        return outcomes

    def _add(self, capture: FinishedCapture) -> _Shard | None:
        """The shard, taken out, if this is its last sequence."""
        place = capture.capture.harvest
        assert place is not None, "the worker gives every capture of a harvest its place"
        sequence = _sequence(capture, place)
        key, part = (place.uri, place.key), f"pp{capture.pp}{capture.part}"
        with self._lock:
            parts = self._shards.pop(key, {})
            shard = parts.setdefault(part, _Shard(place, capture.sites, capture.dtype, capture.pp))
            shard.parts[place.index] = sequence
            whole = parts.pop(part) if len(shard.parts) == place.sequences else None
            if parts:
                self._shards[key] = parts
            while (
                len(self._shards) > SHARDS_AT_ONCE + 1
            ):  # of an attempt that was stopped: the worker has no more under way
                self._shards.pop(next(iter(self._shards)))
        return whole


def _sequence(capture: FinishedCapture, place: HarvestPlace) -> _Sequence:
    """A copy of the rows: the memory that they are in is used again."""
    at = np.array(capture.positions, dtype=np.int64)
    kept = _kept(at, capture.spec.prompt_tokens, place)
    starts = np.array([span[2] for span in place.spans], dtype=np.int64)
    of = np.searchsorted(starts, at, side="right") - 1
    documents, firsts = (
        np.array([span[part] for span in place.spans], dtype=np.int64)[of] for part in (0, 1)
    )
    keys = {
        "documents": documents[kept],
        "positions": (firsts + at - starts[of])[kept],
        "token_ids": np.array(capture.token_ids, dtype=np.int64)[kept],
    }
    if place.prompt is not None:
        keys["generated"] = (at[kept] >= capture.spec.prompt_tokens).astype(np.int64)
    rows = {}
    for hook, layers in capture.sites.items():
        for layer in layers:
            bits = np.frombuffer(
                b"".join(capture.rows(hook, layer)) if len(at) else b"", dtype=RAW[capture.dtype][1]
            )
            whole = bits.reshape(len(at), capture.hidden_size)
            rows[site_name(hook, layer)] = whole if kept.all() else whole[kept]
    return _Sequence(keys, rows, sum(capture.non_finite.values()))


def _kept(at: np.ndarray, prompt_tokens: int, place: HarvestPlace) -> np.ndarray:
    """bool `[positions]`: the worker chose those of the prompt; of generated ones every n-th."""
    generated = at >= prompt_tokens
    chosen = (
        np.ones(len(at), bool)
        if place.prompt is None
        else np.isin(at, np.array(place.prompt, dtype=np.int64))
    )
    return np.where(generated, (at - prompt_tokens) % place.every == 0, chosen)


def _write(shard: _Shard, capture: FinishedCapture) -> CapturedFile:
    """Make the shard an object, durable when this returns. Raises OSError."""
    place, parts = shard.place, [shard.parts[index] for index in range(shard.place.sequences)]
    keys = {name: np.concatenate([part.keys[name] for part in parts]) for name in parts[0].keys}
    order = row_order(place.shuffle, keys["documents"], keys["positions"])
    dtype = shard.dtype if place.dtype == "model" else place.dtype
    tensors = [
        (name, "int64", np.ascontiguousarray(values[order])) for name, values in keys.items()
    ]
    scales: list[tuple[str, str, np.ndarray]] = []
    rows: list[tuple[str, str, np.ndarray]] = []
    for hook, layers in shard.sites.items():
        for layer in layers:
            name = site_name(hook, layer)
            ordered = np.concatenate([part.rows.pop(name) for part in parts])[order]
            bits, scale = encoded_rows(ordered, shard.dtype, dtype)
            rows.append((name, dtype, np.ascontiguousarray(bits)))
            if scale is not None:
                scales.append((f"{name}.scale", "float32", scale))
    assert (dtype in SCALED) == bool(scales)
    buffers, size, crc32 = shard_buffers(
        [*tensors, *scales, *rows], {"harvest": msgspec.json.encode(place.metadata).decode()}
    )
    path = f"{place.key}.pp{shard.pp}{capture.part}.safetensors"
    writer = open_store(place.uri).writer()
    try:
        writer.append(path, buffers)
        writer.commit()
    except BaseException:
        writer.abort()
        raise
    sites = sum(map(len, shard.sites.values()))
    return CapturedFile(
        path=path,
        bytes=size,
        crc32=crc32,
        rows=len(order) * sites,
        sites=shard.sites,
        positions=len(order),
        layout=LAYOUT,
        tag=HARVEST,
        non_finite=sum(part.non_finite for part in parts),
    )
