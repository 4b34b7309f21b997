"""Cuts a unit's documents into sequences and shards.

The result depends on the documents and the harvest only, so every attempt cuts alike.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..files.order import CutSpan, keys_of, sampled
from ..records.harvests import HarvestPositions, StoredHarvest


@dataclass(frozen=True)
class CutDocument:
    number: int  # in the source's order, from 0
    token_ids: np.ndarray  # int64 `[tokens]`
    in_spans: np.ndarray | None = None  # bool `[tokens]`; None: the harvest has no spans

    def first(self, tokens: int) -> "CutDocument":
        """Returns the document with its first `tokens` tokens only."""
        return CutDocument(
            self.number,
            self.token_ids[:tokens],
            None if self.in_spans is None else self.in_spans[:tokens],
        )


@dataclass(frozen=True)
class CutSequence:
    """Tokens that the model gets together."""

    token_ids: np.ndarray  # int64 `[tokens]`
    spans: list[CutSpan]
    chosen: np.ndarray  # int64, ascending: positions in the sequence that give rows

    @property
    def whole(self) -> bool:
        return len(self.chosen) == len(self.token_ids)


def cut(
    harvest: StoredHarvest, documents: Sequence[CutDocument], bos: int | None, eos: int | None
) -> list[CutSequence]:
    """Returns the sequences that give rows, in order.

    `bos`, `eos`: the model's tokens of a text's beginning and end.
    """
    pieces = (
        _packed(harvest, documents, eos)
        if harvest.cut.fit == "pack"
        else _unpacked(harvest, documents)
    )
    in_spans = {each.number: each.in_spans for each in documents if each.in_spans is not None}
    sequences = [
        CutSequence(ids, spans, np.flatnonzero(_eligible(harvest, ids, spans, bos, in_spans)))
        for ids, spans in pieces
    ]
    if harvest.positions.sample is not None:
        sequences = _sampled(harvest.positions, harvest.positions.sample, sequences)
    generates = harvest.generate is not None  # generated tokens may give rows
    return [sequence for sequence in sequences if generates or len(sequence.chosen)]


def _unpacked(
    harvest: StoredHarvest, documents: Iterable[CutDocument]
) -> Iterator[tuple[np.ndarray, list[CutSpan]]]:
    length = harvest.max_length
    for document in documents:
        ids = document.token_ids if harvest.cut.fit == "split" else document.token_ids[:length]
        for start in range(0, len(ids), length):
            piece = ids[start : start + length]
            yield piece, [(document.number, start, 0, len(piece))]


# Packing never crosses a unit, so that a unit can be computed again alone.
def _packed(
    harvest: StoredHarvest, documents: Iterable[CutDocument], eos: int | None
) -> Iterator[tuple[np.ndarray, list[CutSpan]]]:
    between = np.array([] if eos is None else [eos], dtype=np.int64)
    parts: list[np.ndarray] = []
    spans: list[CutSpan] = []
    filled = 0
    for document in documents:
        if not len(document.token_ids):
            continue
        stream = np.concatenate([document.token_ids, between])
        tokens = len(document.token_ids)
        at = 0
        while at < len(stream):
            take = min(harvest.max_length - filled, len(stream) - at)
            parts.append(stream[at : at + take])
            if of_document := max(0, min(tokens, at + take) - at):  # without `eos`
                spans.append((document.number, at, filled, of_document))
            filled = filled + take
            at = at + take
            if filled == harvest.max_length:
                yield np.concatenate(parts), spans
                parts = []
                spans = []
                filled = 0
    if spans:
        yield np.concatenate(parts), spans


def _eligible(
    harvest: StoredHarvest,
    ids: np.ndarray,
    spans: Sequence[CutSpan],
    bos: int | None,
    in_spans: Mapping[int, np.ndarray],
) -> np.ndarray:
    """Returns which positions of a sequence may give rows: bool `[tokens]`. `in_spans`: number of
    a document → which of its tokens are in the harvest's spans.
    """
    rule = harvest.positions
    mask = np.zeros(len(ids), bool)
    for document, position, start, tokens in spans:
        places = position + np.arange(tokens)
        mask[start : start + tokens] = places % rule.every == 0
        if document in in_spans:
            mask[start : start + tokens] &= in_spans[document][places]
    mask[: rule.skip_first] = False
    if rule.skip_bos and bos is not None:
        for _, position, start, _ in spans:
            mask[start] &= position > 0 or ids[start] != bos
    return mask if rule.prompt else np.zeros(len(ids), bool)


def _sampled(
    rule: HarvestPositions, sample: int, sequences: Sequence[CutSequence]
) -> list[CutSequence]:
    """Returns the sequences with `sample` positions of each document, which are sampled over all
    sequences that have a part of it.
    """
    keys = [np.zeros((2, 0), np.int64)]
    keys += [np.stack(keys_of(sequence.chosen, sequence.spans)) for sequence in sequences]
    documents, positions = np.concatenate(keys, axis=1)
    kept = sampled(rule.seed, documents, positions, sample)
    parts = np.split(kept, np.cumsum([part.shape[1] for part in keys]))[1:]
    return [
        replace(sequence, chosen=sequence.chosen[part])
        for sequence, part in zip(sequences, parts, strict=False)
    ]


def shards_of(harvest: StoredHarvest, sequences: Sequence[CutSequence]) -> list[list[CutSequence]]:
    """Returns the sequences of each shard, in order: as many as fit `shards.mib` of rows, at least
    one.

    A row counts with its size in the model's dtype, and a request as if it generated `max_tokens`,
    so shards are smaller on disk if their dtype is int8 or float8.
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


def fed(document: CutDocument, harvest: StoredHarvest) -> int:
    """Returns how many tokens the model is fed for `document`."""
    tokens = len(document.token_ids)
    if harvest.cut.fit == "truncate":
        return min(tokens, harvest.max_length)
    return tokens + 1 if tokens and harvest.cut.fit == "pack" else tokens
