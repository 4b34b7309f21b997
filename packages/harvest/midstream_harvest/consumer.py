"""Shards of harvests.

The consumer `harvest` gathers the rows of a shard's sequences, and writes the shard when its last
sequence has arrived. The rank's memory is bounded by the number of shards that the worker submits
to the engine at a time. A shard that cannot be written is dropped and reported; the worker has it
computed again.
"""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from midstream.schemas.base.records import from_msgpack
from midstream.schemas.jobs.receipts import PLACED, CapturedFile
from midstream.storage.store import committed, open_store
from midstream.workers.runner.files.finished_rows import FinishedCapture, Outcome

from .files.order import keys_of, row_order
from .files.shards import RAW, encoded_rows, shard_buffers, site_name
from .names import HARVEST
from .records.work import SCALED, SHARDS_AT_ONCE, HarvestPlace

logger = logging.getLogger(__name__)


@dataclass
class _Sequence:
    """Rows of one sequence: int64 keys `[rows]`, and each site's rows as bits `[rows, width]`."""

    keys: dict[str, np.ndarray]
    rows: dict[str, np.ndarray]
    non_finite: int


#: Received part of one stage's file, by the sequence's index.
_Shard = dict[int, _Sequence]


class OpenShards:
    """Incomplete shards of one rank, shared by its writer threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: (store, key) → part of the stage → its shard so far; the last updated key comes last.
        self._shards: dict[tuple[str, str], dict[str, _Shard]] = {}

    def consume(self, captures: Sequence[FinishedCapture]) -> list[Outcome]:
        """Add sequences to their shards, and write complete shards. Does not raise: a shard's error
        is the outcome of its last sequence.
        """
        outcomes = []
        for capture in captures:
            try:
                whole = self._add(capture)
                outcomes.append(
                    Outcome() if whole is None else Outcome(files=(_write(whole, capture),))
                )
            except OSError as error:
                outcomes.append(Outcome(error=str(error), unavailable=True))
            except Exception as error:
                logger.exception("%s: its shard failed", capture)
                outcomes.append(Outcome(error=str(error) or repr(error)))
        return outcomes

    def _add(self, capture: FinishedCapture) -> _Shard | None:
        """Add a sequence; return and remove its shard if it is now complete."""
        place = _place_of(capture)
        sequence = _sequence(capture, place)
        key = (place.uri, place.key)
        part = f"pp{capture.pp}{capture.part}"
        with self._lock:
            parts = self._shards.pop(key, {})
            shard = parts.setdefault(part, {})
            shard[place.index] = sequence
            whole = parts.pop(part) if len(shard) == place.sequences else None
            if parts:
                self._shards[key] = parts
            # More shards than the worker submits at a time: the oldest is of a stopped attempt.
            while len(self._shards) > SHARDS_AT_ONCE + 1:
                self._shards.pop(next(iter(self._shards)))
        return whole


def _place_of(capture: FinishedCapture) -> HarvestPlace:
    """Return the place that the worker gave the capture."""
    return from_msgpack(capture.capture.place, HarvestPlace)


def _sequence(capture: FinishedCapture, place: HarvestPlace) -> _Sequence:
    """Copy a capture's rows, whose memory will be reused."""
    at = np.array(capture.positions, dtype=np.int64)
    kept = _kept(at, capture.spec.prompt_tokens, place)
    documents, positions = keys_of(at, place.spans)
    keys = {
        "documents": documents[kept],
        "positions": positions[kept],
        "token_ids": np.array(capture.token_ids, dtype=np.int64)[kept],
    }
    if place.prompt is not None:
        keys["generated"] = (at[kept] >= capture.spec.prompt_tokens).astype(np.int64)
    rows = {}
    for hook, layers in capture.sites.items():
        for layer in layers:
            whole = np.frombuffer(
                b"".join(capture.rows(hook, layer)) if len(at) else b"", dtype=RAW[capture.dtype][1]
            ).reshape(len(at), capture.hidden_size)
            rows[site_name(hook, layer)] = whole if kept.all() else whole[kept]
    return _Sequence(keys, rows, sum(capture.non_finite.values()))


def _kept(at: np.ndarray, prompt_tokens: int, place: HarvestPlace) -> np.ndarray:
    """Return which positions are kept, bool `[positions]`: prompt positions that the worker chose,
    and every n-th generated one.
    """
    chosen = (
        np.ones(len(at), bool)
        if place.prompt is None
        else np.isin(at, np.array(place.prompt, dtype=np.int64))
    )
    return np.where(at >= prompt_tokens, (at - prompt_tokens) % place.every == 0, chosen)


def _write(shard: _Shard, capture: FinishedCapture) -> CapturedFile:
    """Write the shard as an object, which is durable when this returns. Raises OSError.

    `capture`: any of its sequences.
    """
    place = _place_of(capture)
    parts = [shard[index] for index in range(place.sequences)]
    keys = {name: np.concatenate([part.keys[name] for part in parts]) for name in parts[0].keys}
    order = row_order(place.shuffle, keys["documents"], keys["positions"])
    dtype = capture.dtype if place.dtype == "model" else place.dtype
    tensors = [
        (name, "int64", np.ascontiguousarray(values[order])) for name, values in keys.items()
    ]
    scales: list[tuple[str, str, np.ndarray]] = []
    rows: list[tuple[str, str, np.ndarray]] = []
    for hook, layers in capture.sites.items():
        for layer in layers:
            name = site_name(hook, layer)
            ordered = np.concatenate([part.rows.pop(name) for part in parts])[order]
            bits, scale = encoded_rows(ordered, capture.dtype, dtype)
            rows.append((name, dtype, np.ascontiguousarray(bits)))
            if scale is not None:
                scales.append((f"{name}.scale", "float32", scale))
    assert (dtype in SCALED) == bool(scales)
    buffers, size, crc32 = shard_buffers(
        [*tensors, *scales, *rows], {"harvest": msgspec.json.encode(place.metadata).decode()}
    )
    path = f"{place.key}.pp{capture.pp}{capture.part}.safetensors"
    with committed(open_store(place.uri)) as writer:
        writer.append(path, buffers)
    return CapturedFile(
        path=path,
        bytes=size,
        crc32=crc32,
        rows=len(order) * len(rows),
        sites=capture.sites,
        positions=len(order),
        layout=PLACED,
        tag=HARVEST,
        non_finite=sum(part.non_finite for part in parts),
    )
