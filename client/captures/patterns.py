"""Attention patterns of a prompt over heads and layers, and scores of what each head attends to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import numpy as np

from ...schemas.base.errors import MidstreamError, Translated, invalid
from ...schemas.base.records import Plotted
from ...schemas.prompts.selectors import LayerSelector, SelectorError, as_ranges, resolve_layers
from .attention import MAX_BYTES, heads_of

if TYPE_CHECKING:
    from .reader import CaptureReader

#: Which keys a head attends to. For the query at position i: `previous`: key i-1; `current`: key i;
#: `first`: key 0; `duplicate`: earlier occurrences of the query's token; `induction`: the keys
#: right after those occurrences.
Behaviour = Literal["previous", "current", "first", "duplicate", "induction"]
BEHAVIOURS: tuple[Behaviour, ...] = get_args(Behaviour)


class HeadScore(NamedTuple):
    """A head's mean share of attention, 0 to 1, to the keys of a behaviour."""

    layer: int
    head: int
    score: float


@dataclass(frozen=True, eq=False)
class Attention(Plotted):
    """The attention patterns of one prompt.

    Both axes of every pattern are `positions`; a query's row holds the weights of the keys.
    """

    job: str
    positions: list[int]  # absolute; of the prompt's tokens and of captured generated tokens
    token_ids: list[int]
    # the text of each token, with its leading space; its id in digits if the text is unknown
    tokens: list[str]
    patterns: dict[int, np.ndarray]  # layer → float32 `[heads, query, key]`
    heads: dict[int, list[int]]  # layer → number of each head in its pattern
    absent: dict[int, str] = field(default_factory=dict)  # layer → why it has no pattern

    @property
    def layers(self) -> list[int]:
        return list(self.patterns)

    @property
    def panels(self) -> list[tuple[int, int]]:
        """(layer, head) of every pattern."""
        return [(layer, head) for layer, heads in self.heads.items() for head in heads]

    def __getitem__(self, layer: int) -> np.ndarray:
        """Return a layer's patterns, `[heads, query, key]`. Raises MidstreamError that lists the
        layers with patterns.
        """
        if layer not in self.patterns:
            why = f": {self.absent[layer]}" if layer in self.absent else ""
            raise MidstreamError(
                "not_found",
                f"layer {layer} has no pattern here{why}",
                field="layer",
                allowed=as_ranges(self.patterns),
            )
        return self.patterns[layer]

    def of(self, layer: int, head: int) -> np.ndarray:
        """Return the pattern of one head, float32 `[query, key]`. `head`: its number in the model.

        Raises MidstreamError that lists the heads with patterns.
        """
        pattern = self[layer]
        heads = self.heads[layer]
        if head not in heads:
            raise MidstreamError(
                "not_found",
                f"head {head} of layer {layer} is not here",
                field="head",
                allowed=as_ranges(heads),
            )
        of_head: np.ndarray = pattern[heads.index(head)]
        return of_head

    def scores(self, behaviour: Behaviour) -> list[HeadScore]:
        """Return each head's attention to the keys of a behaviour: the mean over the queries that
        have such keys, strongest first.

        Raises MidstreamError: `invalid_request` for an unknown behaviour, `not_found` if no query
        has such a key.
        """
        if behaviour not in _KEYS:
            raise invalid("behaviour", f"{behaviour!r} is not known", allowed=", ".join(BEHAVIOURS))
        keys = self._keys(behaviour)
        has_key = keys.any(axis=1)
        if not has_key.any():
            raise MidstreamError(
                "not_found",
                f"no query has a key for {behaviour!r}",
                allowed=", ".join(self.behaviours()) or "no behaviour",
            )
        result = []
        for layer, pattern in self.patterns.items():
            shares = (pattern[:, has_key] * keys[has_key]).sum(axis=2).mean(axis=1)
            result += [
                HeadScore(layer, head, float(share))
                for head, share in zip(self.heads[layer], shares, strict=True)
            ]
        return sorted(result, key=lambda item: -item.score)

    def behaviours(self) -> list[Behaviour]:
        """Return the behaviours for which at least one query of this prompt has keys."""
        return [behaviour for behaviour in BEHAVIOURS if self._keys(behaviour).any()]

    def _keys(self, behaviour: Behaviour) -> np.ndarray:
        """Return the keys of a behaviour, bool `[query, key]`."""
        return _KEYS[behaviour](np.array(self.positions), np.array(self.token_ids))

    def __repr__(self) -> str:
        return (
            f"Attention(job={self.job!r}, layers={as_ranges(self.patterns)}, "
            f"heads={len(self.panels)}, tokens={len(self.positions)})"
        )


def _back(positions: np.ndarray, by: int) -> np.ndarray:
    behind: np.ndarray = positions[:, None] - positions[None, :] == by
    return behind


def _duplicates(positions: np.ndarray, ids: np.ndarray) -> np.ndarray:
    again: np.ndarray = (ids[:, None] == ids[None, :]) & (positions[None, :] < positions[:, None])
    return again


def _followers(positions: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return the keys directly after an earlier occurrence of the query's token, and before the
    query.
    """
    keys = np.zeros((len(ids), len(ids)), dtype=bool)
    adjacent = np.flatnonzero(np.diff(positions) == 1)
    keys[:, adjacent + 1] = _duplicates(positions, ids)[:, adjacent]
    return keys & (positions[None, :] < positions[:, None])


#: Behaviour → function of (positions, token ids) that returns its keys, bool `[query, key]`.
_KEYS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "previous": lambda positions, ids: _back(positions, 1),
    "current": lambda positions, ids: _back(positions, 0),
    "first": lambda positions, ids: (positions[None, :] == 0) & (positions[:, None] > 0),
    "duplicate": _duplicates,
    "induction": _followers,
}


def attention_of(
    reader: "CaptureReader",
    layers: LayerSelector = "all",
    heads: LayerSelector | None = None,
    request: int = 0,
) -> Attention:
    """Compute the patterns of one request from a capture of `q` and `k`.

    `layers`: captured layers; "all" leaves out layers whose attention has no pattern, and lists
    them in `absent`. Raises what `CaptureReader.attention` raises, and `invalid_request` if the
    patterns together exceed MAX_BYTES.
    """
    captured = [
        layer for layer in reader.layers(request, "q") if layer in reader.layers(request, "k")
    ]
    chosen = captured if layers == "all" else _chosen(layers, reader, request, captured)
    positions = reader.positions(request)
    patterns: dict[int, np.ndarray] = {}
    absent: dict[int, str] = {}
    size = 0
    for layer in chosen:
        if layers == "all" and (why := reader.attention_kind(layer, request).refused):
            absent[layer] = why
            continue
        patterns[layer] = reader.attention(layer, heads, request)
        if (size := size + patterns[layer].nbytes) > MAX_BYTES:
            raise invalid(
                "layers",
                f"the patterns of {len(chosen)} layers exceed {MAX_BYTES >> 20} MiB",
                hint="ask for fewer layers or heads, or use CaptureReader.attention for each layer",
            )
    if not patterns:
        why = (
            "; ".join(f"layer {layer}: {why}" for layer, why in absent.items())
            or "q and k were not captured in the same layers"
        )
        raise MidstreamError(
            "not_found",
            f"there is no attention pattern: {why}",
            field="layers",
            allowed="a capture of the hooks q and k",
        )
    tokens = reader.tokens_of(request)
    numbers = {layer: heads_of(reader.attention_kind(layer, request), heads) for layer in patterns}
    return Attention(
        job=reader.job,
        positions=positions,
        token_ids=reader.token_ids(request),
        tokens=tokens,
        patterns=patterns,
        heads=numbers,
        absent=absent,
    )


def _chosen(
    layers: LayerSelector, reader: "CaptureReader", request: int, captured: Sequence[int]
) -> list[int]:
    """Resolve a selector of layers. Raises MidstreamError that lists the captured layers."""
    with Translated(
        SelectorError, lambda error: invalid("layers", str(error), allowed=as_ranges(captured))
    ):
        chosen = resolve_layers(layers, reader.manifest(request).num_layers)
    if missing := [layer for layer in chosen if layer not in captured]:
        raise MidstreamError(
            "not_found",
            f"q and k were not both captured in layers {as_ranges(missing)}",
            field="layers",
            allowed=as_ranges(captured),
        )
    return chosen
