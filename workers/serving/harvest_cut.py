"""Sequences and shards of a unit: a function of its documents and the harvest alone, so that every
attempt cuts the same.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...schemas.jobs.harvest_order import sampled
from ...schemas.jobs.harvests import StoredHarvest

#: (document, position in it, first token in the sequence, tokens)
Span = tuple[int, int, int, int]


@dataclass(frozen=True)
class Document:
    number: int  # in the source's order, from 0
    token_ids: np.ndarray  # int64 `[tokens]`


@dataclass(frozen=True)
class CutSequence:
    """Tokens that the model gets together.

    `chosen`: int64, ascending: the positions in the sequence that give rows.
    """

    token_ids: np.ndarray  # int64 `[tokens]`
    spans: list[Span]
    chosen: np.ndarray

    @property
    def whole(self) -> bool:
        return len(self.chosen) == len(self.token_ids)


def cut(
    harvest: StoredHarvest, documents: Sequence[Document], bos: int | None, eos: int | None
) -> list[CutSequence]:
    """The sequences that give rows, in order.

    `bos`, `eos`: the model's tokens of a text's beginning and end.
    """
    pieces = (
        _packed(harvest, documents, eos)
        if harvest.cut.fit == "pack"
        else _apart(harvest, documents)
    )
    made = [(ids, spans, _eligible(harvest, ids, spans, bos)) for ids, spans in pieces]
    if harvest.positions.sample is not None:
        made = _sampled(harvest, made)
    keeps = harvest.generate is not None
    return [
        CutSequence(ids, spans, np.flatnonzero(mask))
        for ids, spans, mask in made
        if keeps or mask.any()
    ]


def _apart(
    harvest: StoredHarvest, documents: Iterable[Document]
) -> Iterator[tuple[np.ndarray, list[Span]]]:
    length = harvest.max_length
    for document in documents:
        ids = document.token_ids if harvest.cut.fit == "split" else document.token_ids[:length]
        for start in range(0, len(ids), length):
            piece = ids[start : start + length]
            yield piece, [(document.number, start, 0, len(piece))]


def _packed(
    harvest: StoredHarvest, documents: Iterable[Document], eos: int | None
) -> Iterator[tuple[np.ndarray, list[Span]]]:
    between = np.array([] if eos is None else [eos], dtype=np.int64)
    parts: list[np.ndarray] = []
    spans: list[Span] = []
    filled = 0
    for document in documents:
        if not len(document.token_ids):
            continue
        stream, tokens = np.concatenate([document.token_ids, between]), len(document.token_ids)
        at = 0
        while at < len(stream):
            take = min(harvest.max_length - filled, len(stream) - at)
            parts.append(stream[at : at + take])
            if own := max(0, min(tokens, at + take) - at):
                spans.append((document.number, at, filled, own))
            filled, at = filled + take, at + take
            if filled == harvest.max_length:
                yield np.concatenate(parts), spans
                parts, spans, filled = [], [], 0
    if spans:
        yield np.concatenate(parts), spans


def _eligible(
    harvest: StoredHarvest, ids: np.ndarray, spans: Sequence[Span], bos: int | None
) -> np.ndarray:
    """bool `[tokens]`."""
    rule = harvest.positions
    mask = np.zeros(len(ids), bool)
    for _, position, start, tokens in spans:
        mask[start : start + tokens] = (position + np.arange(tokens)) % rule.every == 0
    mask[: rule.skip_first] = False
    if rule.skip_bos and bos is not None:
        for _, position, start, _ in spans:
            mask[start] &= position > 0 or ids[start] != bos
    return mask if rule.prompt else np.zeros(len(ids), bool)


def _sampled(
    harvest: StoredHarvest, made: Sequence[tuple[np.ndarray, list[Span], np.ndarray]]
) -> list[tuple[np.ndarray, list[Span], np.ndarray]]:
    """The same with fewer positions: a document's are chosen over all sequences that it is in."""
    assert harvest.positions.sample is not None
    keys = [keys_of(np.flatnonzero(mask), spans) for _, spans, mask in made]
    documents = np.concatenate([documents for documents, _ in keys] or [np.zeros(0, np.int64)])
    positions = np.concatenate([positions for _, positions in keys] or [np.zeros(0, np.int64)])
    chosen = sampled(harvest.positions.seed, documents, positions, harvest.positions.sample)
    result, at = [], 0
    for ids, spans, mask in made:
        places = np.flatnonzero(mask)
        fewer = np.zeros(len(ids), bool)
        fewer[places[chosen[at : at + len(places)]]] = True
        at += len(places)
        result.append((ids, spans, fewer))
    return result


def keys_of(places: np.ndarray, spans: Sequence[Span]) -> tuple[np.ndarray, np.ndarray]:
    """Documents and positions in them, int64, of these positions of a sequence, each of which is in
    a span.
    """
    columns = np.array(spans, dtype=np.int64).reshape(-1, 4)
    of = np.searchsorted(columns[:, 2], places, side="right") - 1
    return columns[of, 0], columns[of, 1] + places - columns[of, 2]


def shards_of(harvest: StoredHarvest, sequences: Sequence[CutSequence]) -> list[list[CutSequence]]:
    """The sequences of each shard, in order: as many as make `shards.mib` of rows, at least one.

    Rows are counted as the model computes them, generated ones by the most that there can be: a
    scaled dtype's shards are smaller.
    """
    limit = harvest.shards.mib << 20
    generated = harvest.generate.max_tokens if harvest.generate is not None else 0
    shards: list[list[CutSequence]] = []
    size = 0
    for sequence in sequences:
        rows = (len(sequence.chosen) + generated) * harvest.row_bytes
        if not shards or size + rows > limit:
            shards.append([])
            size = 0
        shards[-1].append(sequence)
        size += rows
    return shards


def fed(document: Document, harvest: StoredHarvest) -> int:
    """Tokens that the model is fed for it."""
    tokens = len(document.token_ids)
    if harvest.cut.fit == "truncate":
        return min(tokens, harvest.max_length)
    return tokens + 1 if tokens and harvest.cut.fit == "pack" else tokens


def within(documents: Sequence[Document], harvest: StoredHarvest, tokens: int) -> list[Document]:
    """The first documents, the last of them cut short, whose sequences have `tokens` tokens; -1:
    all.
    """
    if tokens < 0:
        return list(documents)
    result = []
    for document in documents:
        ids = (
            document.token_ids[: harvest.max_length]
            if harvest.cut.fit == "truncate"
            else document.token_ids
        )
        if tokens <= 0:
            break
        result.append(Document(document.number, ids[:tokens]))
        tokens -= fed(document, harvest)
    return result
