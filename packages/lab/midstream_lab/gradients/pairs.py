"""Pairs of a sweep: both prompts' runs, the metric, and the columns of the grid.

Metrics are differentiable, and computed in float64 from the model's logits.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from midstream.schemas.base.errors import KindError
from midstream.schemas.base.records import by_key
from midstream.schemas.prompts.selectors import resolve_layers

from ..records.sweep_units import Units
from ..records.sweeps import Metric, StoredPair, StoredSweep
from ..results.sweep_metrics import LEAST_DIFFERENCE
from .points import ForwardPass, Points, RowsBySite, SiteKey


class PairError(KindError):
    """A pair has no estimates; the message gives the reason. Other pairs are not affected."""

    KIND = "useless_baseline"


class NonFiniteGradient(KindError):
    """A value or gradient is infinite or not a number; the message names the first site."""

    KIND = "reading_failed"


class PairMetric:
    """The metric of a pair's prompts, each followed by the pair's continuations but for their last
    token (teacher forcing): the log-probability of a continuation is the sum over its tokens, as in
    `sweep_units.nodes_of`.
    """

    def __init__(self, metric: Metric, pair: StoredPair) -> None:
        self._metric = metric
        self._answer = pair.answer
        self._foil = pair.foil
        #: What follows the prompt in each sequence; a suffix that begins another is left out.
        self.suffixes: list[list[int]] = []
        for suffix in sorted((pair.answer[:-1], pair.foil[:-1]), key=len, reverse=True):
            if self._sequence(suffix) is None:
                self.suffixes.append(suffix)
        #: log P of the clean prompt's next token, float64 `[vocabulary]`; required for `kl`.
        self.clean: torch.Tensor | None = None

    def _sequence(self, suffix: list[int]) -> int | None:
        """Return the first sequence in which `suffix` follows the prompt."""
        starts = (other[: len(suffix)] == suffix for other in self.suffixes)
        return next((number for number, same in enumerate(starts) if same), None)

    def sequences(self, prompt: Sequence[int]) -> list[list[int]]:
        """Return the token ids to run, one list for each suffix."""
        return [[*prompt, *suffix] for suffix in self.suffixes]

    def keep(self, prompt: Sequence[int]) -> range:
        """Return the positions whose logits are needed, of all `sequences`."""
        return range(len(prompt) - 1, len(prompt) + max(map(len, self.suffixes)))

    def next_token(self, logits: torch.Tensor) -> torch.Tensor:
        """Return log P over the token after the prompt, float64 `[vocabulary]`.

        `logits`: `[sequences, kept, vocabulary]`.
        """
        return logits[0, 0].double().log_softmax(-1)

    def value(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the metric in nats, 0-d float64; for `recovered`, of the underlying metric."""
        if self._metric == "kl":
            assert self.clean is not None
            clean = self.clean.to(logits.device)
            return (clean.exp() * (clean - self.next_token(logits))).sum()
        answer = self._logprob(logits, self._answer)
        if self._metric == "logprob" or not self._foil:
            return answer
        return answer - self._logprob(logits, self._foil)

    def _logprob(self, logits: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        sequence = self._sequence(tokens[:-1])
        assert sequence is not None
        return -loss(logits[sequence, : len(tokens)], tokens)


class CellColumns(NamedTuple):
    """Columns whose cells write the same dimensions of a row."""

    columns: list[int]
    dims: torch.Tensor | slice  # indices, or bool [width]


class PairColumns:
    """The columns of one pair.

    A place is (position in the patched prompt, position in the source). `member[c, u]`: whether
    column `c`, with the sweep's window around it, writes place `u`; skipped columns write none.
    """

    def __init__(self, sweep: StoredSweep, pair: int, mask: torch.Tensor | None = None) -> None:
        """`mask`: the dimensions that `sweep.mask` writes, bool `[width]`."""
        self._sweep = sweep
        self._columns = sweep.pairs[pair].columns
        self.dims: torch.Tensor | slice = slice(None) if mask is None else mask
        self._units = Units(sweep)
        self._cell = next(self._units.cells(pair))
        written = [
            self._units.patched(self._cell._replace(column=number))[1]
            for number in range(len(self._columns))
        ]
        places = sorted({place for column in written for place in column})
        self.base = [base for base, _ in places]
        self.source = [source for _, source in places]
        self.skipped = [number for number, column in enumerate(written) if not column]
        index = {place: number for number, place in enumerate(places)}
        self.member = torch.zeros(len(written), len(places), dtype=torch.float64)
        for number, column in enumerate(written):
            self.member[number, [index[place] for place in column]] = 1.0

    def parts(self, differences: torch.Tensor) -> list[CellColumns]:
        """Return the columns that are not skipped, by the dimensions that they write.

        `differences`: patched − unpatched row of each place, `[places, width]`, which order
        dimensions by rank.
        """
        grouped = by_key(
            ((column.dims, column.ranks), number)
            for number, column in enumerate(self._columns)
            if number not in self.skipped
        )
        result = []
        order = None
        for (dims, ranks), numbers in grouped.items():
            chosen = (
                torch.tensor(resolve_layers(dims.replace(" ", ""), differences.shape[1]))
                if dims
                else self.dims
            )
            if ranks is not None:
                if order is None:
                    moved = differences[self.member[numbers[0]].bool()].double()
                    order = moved.abs().sum(0).argsort(descending=True, stable=True)
                chosen = order[slice(*ranks)]
            result.append(CellColumns(numbers, chosen))
        return result

    def sums(self, product: torch.Tensor, parts: Sequence[CellColumns]) -> np.ndarray:
        """Return the cells of one layer, float64 `[columns]`; NaN for skipped columns.

        `product`: effect of each element of the rows, `[places, width]`; `parts`: of its layer.
        """
        result = np.full(len(self._columns), np.nan)
        for part in parts:
            vector = product[:, part.dims].double().sum(1).cpu()
            result[part.columns] = (self.member[part.columns] @ vector).numpy()
        return result

    def over_window(self, layers: np.ndarray) -> np.ndarray:
        """Return cells that are sums over the window of layers around each, `[layers, columns]`."""
        number = {layer: index for index, layer in enumerate(self._sweep.layers)}
        windows = (
            self._units.patched(self._cell._replace(layer=index))[0] for index in range(len(layers))
        )
        return np.stack([layers[[number[at] for at in window]].sum(0) for window in windows])


class PairRuns:
    """One pair's unpatched runs, which all estimates start from."""

    def __init__(
        self,
        points: Points,
        sweep: StoredSweep,
        number: int,
        mask: torch.Tensor | None = None,
        sites: Sequence[SiteKey] = (),
    ) -> None:
        """`sites`: whose rows are replaced, by default the sweep's."""
        self.points = points
        self.sweep = sweep
        self.stored = sweep.pairs[number]
        self.columns = PairColumns(sweep, number, mask)
        self.metric = PairMetric(sweep.metric, self.stored)
        self.sites = list(sites) or sweep.sites
        self._source: RowsBySite = {}

    def run(self, extra: Collection[SiteKey] = (), *, grad: bool = True) -> ForwardPass:
        """Run both prompts, keep the source's rows, and set `value`, and the metric of the patched
        and the other prompt in nats, `base` and `source`.

        `extra`: sites beyond those that are replaced, of both runs. Returns the run of the prompt
        to patch, with a graph if `grad` is set.
        """
        sites = {*self.sites, *extra}
        metric = self.metric

        def run(prompt: list[int], grad: bool) -> ForwardPass:
            batch = self.points.batch(metric.sequences(prompt))
            return self.points.run(batch, sites, keep=metric.keep(prompt), grad=grad)

        patched = run(self.stored.base, grad)
        other = None
        if self.sweep.ablation is None:
            other = run(self.stored.source, False)
            self._source = {
                site: rows_at(other.rows(site)[0], self.columns.source) for site in sites
            }
        clean = other if other and not self.sweep.patches_clean else patched
        metric.clean = metric.next_token(clean.logits.detach())
        self.value = metric.value(patched.logits)
        self.base: float = self.value.item()
        self.source: float | None = metric.value(other.logits).item() if other else None
        require_finite({("", -1): self.value.detach()})
        return patched

    def replaced(self, site: SiteKey, run: ForwardPass) -> tuple[torch.Tensor, torch.Tensor]:
        """Return unpatched rows, and patched − unpatched rows, at all places of the pair's columns,
        both float32 `[places, width]`. `run`: the unpatched run.
        """
        rows = run.rows(site)[0]
        base = rows_at(rows, self.columns.base)
        if self.sweep.ablation == "zeros":
            source = torch.zeros_like(base)
        elif self.sweep.ablation == "mean":
            source = rows[: len(self.stored.base)].float().mean(0).expand_as(base)
        else:
            source = self._source[site]
        return base, self.sweep.alpha * (source - base)

    def along(
        self,
        run: ForwardPass,
        moves: Sequence[tuple[SiteKey, float]],
        read: Collection[SiteKey] = (),
    ) -> tuple[ForwardPass, RowsBySite]:
        """Run the prompt once for each move, in one batch: with the rows of its site that share of
        the way to the patched ones. Return the run, and site → gradient of the metrics' sum.

        `read`: sites beyond those that move; `run`: the unpatched run.
        """
        prompt = self.stored.base
        copies = len(self.metric.suffixes)

        def edit(site: SiteKey, rows: torch.Tensor) -> torch.Tensor:
            edited = rows
            for number, (moved, share) in enumerate(moves):
                if moved == site and share:
                    base, differences = self.replaced(site, run)
                    patched = base.clone()
                    patched[:, self.columns.dims] += share * differences[:, self.columns.dims]
                    edited = rows.clone() if edited is rows else edited
                    mine = slice(number * copies, (number + 1) * copies)
                    edited[mine, self.columns.base] = patched.to(rows.dtype)
            return edited

        moving = self.points.run(
            self.points.batch(self.metric.sequences(prompt) * len(moves)),
            {*read, *(site for site, _ in moves)},
            keep=self.metric.keep(prompt),
            edit=edit,
            grad=True,
        )
        values = [self.metric.value(part) for part in moving.logits.split(copies)]
        return moving, moving.gradients(torch.stack(values).sum())

    def slope(self, gradients: torch.Tensor) -> torch.Tensor:
        """Return the gradient at each place, `[places, width]` float64, of the prompt's copies."""
        return gradients.double().sum(0)[self.columns.base]

    def cells(self, site: SiteKey, run: ForwardPass, slope: torch.Tensor) -> np.ndarray:
        """Return the cells of a site in nats, `[columns]`. Raises NonFiniteGradient."""
        differences = self.replaced(site, run)[1]
        product = differences.double() * slope
        require_finite({site: product})
        return self.columns.sums(product, self.columns.parts(differences))

    def require_slope(self) -> None:
        """Raises PairError if the metric has no gradient at the unpatched prompt."""
        if self.sweep.metric == "kl" and self.sweep.patches_clean:
            raise PairError(
                "kl of the clean prompt to itself has a gradient of zero: use integrated "
                "gradients, or the metric logprob or logit_diff"
            )

    def scale(self) -> float:
        """Return what effects in nats are multiplied by. Raises PairError."""
        if self.sweep.metric != "recovered":
            return 1.0
        assert self.source is not None
        if abs(self.source - self.base) < LEAST_DIFFERENCE:
            raise PairError(
                f"the two prompts differ too little for `recovered`: {self.base:.4f} nats for the "
                f"prompt to patch and {self.source:.4f} for the other; at least "
                f"{LEAST_DIFFERENCE} are needed"
            )
        return 1.0 / (self.source - self.base)


def rows_at(rows: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
    """Return the rows at `positions`, `[positions, width]` float32. `rows`: `[tokens, width]`."""
    return rows[list(positions)].float()


def loss(logits: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    """Return −Σ log P(token), in nats. `logits`: `[tokens, vocabulary]`."""
    return cross_entropy(
        logits.double(), torch.tensor(tokens, device=logits.device), reduction="sum"
    )


def require_finite(tensors: Mapping[Any, torch.Tensor]) -> None:
    """Raises NonFiniteGradient for the first site, in this order, with a value that is not finite.

    Keys are (hook, layer); a key without a hook stands for the scalar itself.
    """
    for (hook, layer), tensor in tensors.items():
        count = int((~tensor.isfinite()).sum())
        if count and not hook:
            raise NonFiniteGradient(f"the value itself is not finite: {float(tensor)}")
        if count:
            raise NonFiniteGradient(
                f"{hook} of layer {layer}: not finite: {count} of {tensor.numel()} values"
            )
