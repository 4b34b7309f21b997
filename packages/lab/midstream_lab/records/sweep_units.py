"""The requests of a sweep and their numbering, shared by planner, worker and reader.

First come the control units of each pair: base, source (not in an ablation), sender (if the sweep's
path has one) and `noise` no-op patches; then all cells, ordered by pair, hook, layer and column;
then, of an attribution, the estimates of each pair, and the features of each pair that are
computed exactly. A unit takes one request per node (see `Node`): an answer of several tokens is
graded token by token, each after the previous ones. A cell of a path may take two passes.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from midstream.schemas.jobs.works import Work, WorkFacts

from .estimates import FeatureScore
from .sweeps import PatchPlace, StoredPair, StoredSweep, Unit


class Node(NamedTuple):
    """A request that appends `prefix` to the prompt, and grades each of `token_ids` as the next
    token.
    """

    prefix: tuple[int, ...]
    token_ids: tuple[int, ...]  # ascending, each once


def nodes_of(pair: StoredPair) -> list[Node]:
    """Return the nodes that give the log-probabilities of answer and foil. The first node has an
    empty prefix: it is the prompt itself.
    """
    graded: dict[tuple[int, ...], set[int]] = {(): set()}  # prefix → next tokens
    for continuation in (pair.answer, pair.foil):
        for place, token in enumerate(continuation):
            graded.setdefault(tuple(continuation[:place]), set()).add(token)
    return [Node(prefix, tuple(sorted(token_ids))) for prefix, token_ids in graded.items()]


# The numbers follow from the sweep alone, so worker, relay and readers need no table of them, and
# receipts name no ids of the engine.
class Units:
    """The numbering of one sweep's units and requests."""

    def __init__(self, sweep: StoredSweep) -> None:
        self._sweep = sweep
        self.nodes = [nodes_of(pair) for pair in sweep.pairs]
        self.passes = 1 if sweep.path is None else sweep.path.passes
        # the most requests of one unit
        self.width = max(len(nodes) for nodes in self.nodes) * self.passes
        self._sends = sweep.path is not None and sweep.path.sender is not None
        self._controls = 2 + self._sends + sweep.noise  # of each pair
        self.first_cell = len(sweep.pairs) * self._controls
        attributed = sweep.attributed
        # the most features of a pair that are computed exactly
        self._features = 0 if attributed is None or attributed.sae is None else attributed.most

    @cached_property
    def requests(self) -> int:
        """The exclusive upper bound of request numbers. Not all numbers are in use."""
        estimates = len(self._sweep.pairs) if self._sweep.attributed is not None else 0
        features = len(self._sweep.pairs) * self._features
        return (self.first_cell + self._sweep.num_cells + estimates + features) * self.width

    @cached_property
    def tokens(self) -> int:
        """The number of tokens of all requests: their prompts, and one token each, also of a
        first pass, which computes none.

        Skipped cells do not count. Tokens that the engine computes once for several requests count
        for each request. Of an attribution, every point at which gradients are taken counts as
        three passes of both prompts: one forward, and a backward pass of two.
        """
        sweep = self._sweep
        total = 0
        attributed = sweep.attributed
        most = sweep.cells_of_pair if attributed is None else attributed.most
        for stored, nodes in zip(sweep.pairs, self.nodes, strict=True):
            columns = sum(bool(column.places) for column in stored.columns)
            cells = min(self._features or columns * len(sweep.hooks) * len(sweep.layers), most)
            if attributed is not None:
                total += 3 * attributed.steps * (len(stored.base) + len(stored.source))
                if not cells:
                    continue
            patched = self._sends + sweep.noise + self.passes * cells if columns else 0
            continuation = sum(len(node.prefix) + 1 for node in nodes)
            total += (1 + patched) * (len(nodes) * len(stored.base) + continuation)
            total += len(nodes) * len(stored.source) + continuation if stored.source else 0
        return total

    def base(self, pair: int) -> Unit:
        return Unit(pair * self._controls, "base", pair)

    def source(self, pair: int) -> Unit:
        return Unit(pair * self._controls + 1, "source", pair)

    def sender(self, pair: int) -> Unit | None:
        """Return the unit of a path's fixed sender, the first pass of all cells; None if it has
        none.
        """
        return Unit(pair * self._controls + 2, "sender", pair) if self._sends else None

    def noise(self, pair: int) -> list[Unit]:
        """Return the no-op patches, spread over layers and unskipped columns; none if every column
        is skipped.
        """
        sweep = self._sweep
        columns = [place for place, column in enumerate(sweep.pairs[pair].columns) if column.places]
        units = []
        for number in range(sweep.noise if columns else 0):
            share = (2 * number + 1) / (2 * sweep.noise)  # the middle of the n-th of equal parts
            layer = int(share * len(sweep.layers))
            column = columns[number * 7919 % len(columns)]
            units.append(
                Unit(
                    pair * self._controls + 2 + self._sends + number,
                    "noise",
                    pair,
                    0,
                    layer,
                    column,
                )
            )
        return units

    @property
    def cell_numbers(self) -> range:
        return range(self.first_cell, self.first_cell + self._sweep.num_cells)

    def cells_of(self, pair: int) -> range:
        """Return the numbers of a pair's cells."""
        many = self._sweep.cells_of_pair
        return self.cell_numbers[pair * many : (pair + 1) * many]

    def cells(self, pair: int) -> Iterator[Unit]:
        """Return all cells of a pair, including skipped ones, by number."""
        return map(self.cell, self.cells_of(pair))

    def estimate(self, pair: int) -> Unit:
        return Unit(self.first_cell + self._sweep.num_cells + pair, "estimate", pair)

    def features(self, pair: int, scores: Sequence[FeatureScore]) -> list[Unit]:
        """Return the units that compute features exactly. `scores`: the pair's
        `StoredAttribution.checked_features`.
        """
        first = self.estimate(len(self._sweep.pairs)).number + pair * self._features
        return [
            Unit(first + place, "cell", pair, column=score.column, feature=score.feature)
            for place, score in enumerate(scores)
        ]

    def cell(self, number: int) -> Unit:
        """Return the cell with this number, which is one of `cell_numbers`."""
        remaining, column = divmod(number - self.first_cell, self._sweep.num_columns)
        remaining, layer = divmod(remaining, len(self._sweep.layers))
        pair, hook = divmod(remaining, len(self._sweep.hooks))
        return Unit(number, "cell", pair, hook, layer, column)

    def patched(self, unit: Unit) -> tuple[list[int], list[PatchPlace]]:
        """Return the layers of the model and the places that a cell or a noise unit patches: its
        own, and those within the sweep's window around it; ascending.

        There are no places if the unit's column is skipped.
        """
        sweep = self._sweep
        columns = self._sweep.pairs[unit.pair].columns
        layers = sweep.layers[_around(unit.layer, sweep.window.layers)]
        if not columns[unit.column].places:
            return layers, []
        places = {
            base: source
            for column in columns[_around(unit.column, sweep.window.positions)]
            for base, source in column.places
        }
        return layers, sorted(places.items())

    def request(self, unit: Unit, node: int) -> int:
        """Return the number of the request of `unit` at this node."""
        return unit.number * self.width + node

    def first_request(self, unit: Unit) -> int:
        """Return the number of the request that is the first pass of a path's cell or sender."""
        return unit.number * self.width + self.passes - 1


def _around(place: int, width: int) -> slice:
    """Return the window of `width` indices centred on `place` (for an even width, one more after it
    than before), cut off at 0.
    """
    first = place - (width - 1) // 2
    return slice(max(first, 0), first + width)


class SweepWork(Work, tag="sweep"):
    """A sweep, or an attribution."""

    sweep: StoredSweep

    @cached_property
    def units(self) -> Units:
        return Units(self.sweep)

    @cached_property
    def facts(self) -> WorkFacts:
        pairs = self.sweep.pairs
        units = self.units
        cells = self.sweep.num_exact
        prompts = (pairs[0].source_tokens, pairs[0].base_tokens)
        return WorkFacts(
            title=" → ".join("".join(tokens) for tokens in prompts if tokens),
            tokens=units.tokens,
            requests=units.requests,
            cells=cells,
            tags=("base", "source")[: 1 if self.sweep.ablation else 2] if cells else (),
            lengths=tuple((f"pairs[{index}]", pair.longest) for index, pair in enumerate(pairs)),
            wants_receipts=True,
        )
