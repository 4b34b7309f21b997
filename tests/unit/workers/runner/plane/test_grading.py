"""What a rank says of the next token after a prompt, and when it says that it cannot. And at which
layer a step's forward begins (re-entry), and what the layers of a rank then see.
"""

import contextlib
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from rank_kit import view_of
from torch import nn

from midstream.kernels import STREAM
from midstream.schemas.prompts.selectors import PositionSelector
from midstream.schemas.requests.specs import (
    EntryPoint,
    Grade,
    RankSpec,
    StoredCapture,
    StoredSteering,
    steering_rows,
)
from midstream.workers.runner.base.engine_step import RequestRows, StepView
from midstream.workers.runner.plane.grading import KEPT, Grading, tap
from midstream.workers.runner.plane.layer_gate import LayerGate, install_gate
from midstream.workers.runner.plane.reentry import Reentry, first_layer
from midstream.workers.runner.plane.reports import lacking
from midstream.workers.runner.plane.step_parts import RanStep, StepBatch
from midstream.workers.runner.rows.planner import Tracked
from midstream.workers.runner.rows.slot_table import Slots

VOCABULARY = 50
PROMPT = 6


def asking(number: int = 0, token_ids: tuple[int, ...] = (3, 7), **options: str) -> Tracked:
    grade = Grade(token_ids=list(token_ids), **options)
    return Tracked(
        RankSpec(version="", job="j", request=number, attempt=1, prompt_tokens=PROMPT, grade=grade)
    )


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def truth(logits: torch.Tensor) -> np.ndarray:
    values = logits.double().numpy()
    return values - np.log(np.exp(values).sum(-1, keepdims=True))


def batch_of(view: StepView, tracked: Mapping[str, Tracked]) -> StepBatch:
    slots = Slots()
    of_requests = np.zeros(len(view.ids), dtype=np.int64)
    for number, request in enumerate(view.ids):
        if request in tracked:
            of_requests[number] = slots.take((0, 0), STREAM)
            slots.special[of_requests[number]] = tracked[request].special
    return StepBatch(view, tracked, of_requests, slots)


def step(
    grading: Grading, logits: torch.Tensor, *windows: tuple[Tracked | None, int, int, int]
) -> list[tuple[Tracked, str]]:
    """`(request, or a plain one, first position, rows, logits)` in batch order."""
    found = view_of(*((str(n), first, count) for n, (_, first, count, _) in enumerate(windows)))
    view = StepView(found.ids, found.counts, found.positions, [window[3] for window in windows])
    mine = {str(n): tracked for n, (tracked, *_) in enumerate(windows) if tracked is not None}
    grading.plan(batch_of(view, mine), view)
    return grading.take(logits)


#: Of each request of a step (the tokens that it asks for, or None; first position, rows, logits),
#: and request → the row of the logits that grades it.
STEPS = {
    "chunks and decoding": (
        [
            (None, 0, 4, 3),
            ((3, 7), 2, 4, 1),
            ((3, 7), 0, 5, 1),
            ((1,), 6, 1, 2),
            ((49, 0), 0, 6, 1),
        ],
        {1: 3, 4: 7},
    ),
    # vLLM pads the last token of a cached prompt with placeholder drafts.
    "drafts behind a prompt's last token": (
        [(None, 9, 1, 1), ((3, 7), 5, 4, 4), ((1,), 3, 6, 4), ((49, 0), 0, 6, 1)],
        {1: 1, 2: 5, 3: 9},
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_each_prompt_that_ends_in_a_step_is_graded_by_its_own_last_row(name: str) -> None:
    windows, rows = STEPS[name]
    grading = Grading()
    logits = logits_of(sum(window[-1] for window in windows))
    asked = [
        (None if tokens is None else asking(number, tokens), *window)
        for number, (tokens, *window) in enumerate(windows)
    ]
    assert step(grading, logits, *asked) == []  # type: ignore[arg-type]
    for number, (tracked, *_) in enumerate(asked):
        if number in rows:
            found = truth(logits)[rows[number], list(windows[number][0])]
            assert lacking(tracked) == ""
            np.testing.assert_allclose(tracked.graded(), found, atol=1e-6)
        elif tracked is not None:
            assert "not graded" in lacking(tracked)


def test_divergences_are_those_of_float64_for_each_distribution_that_was_kept() -> None:
    grading = Grading()
    logits = logits_of(3)
    one = asking(0, keep="one")
    other = asking(1, (), keep="other")
    both = asking(2, (4,), keep="third", against="one")
    assert step(grading, logits, *((tracked, 0, PROMPT, 1) for tracked in (one, other, both))) == []
    assert both.graded is not None
    logprobs = truth(logits)
    kl = (np.exp(logprobs[0]) * (logprobs[0] - logprobs[2])).sum()
    np.testing.assert_allclose(both.graded(), [logprobs[2, 4], kl], atol=1e-6)
    cells = [asking(10 + n, (n,), against="other" if n % 2 else "one") for n in range(5)]
    later = logits_of(5, seed=1)
    assert step(grading, later, *((cell, 0, PROMPT, 1) for cell in cells)) == []
    for number, cell in enumerate(cells):
        kept = logprobs[number % 2]
        mine = truth(later)[number]
        assert cell.graded is not None
        np.testing.assert_allclose(
            cell.graded(), [mine[number], (np.exp(kept) * (kept - mine)).sum()], atol=1e-6
        )


def test_tokens_without_probability_add_nothing_to_a_divergence() -> None:
    grading = Grading()
    logits = logits_of(2)
    logits[:, 5] = -torch.inf
    base = asking(0, keep="base")
    cell = asking(1, against="base")
    assert step(grading, logits, (base, 0, PROMPT, 1), (cell, 0, PROMPT, 1)) == []
    assert lacking(cell) == ""


def test_kept_distributions_are_bounded_and_missing_ones_fail_alone() -> None:
    grading = Grading()
    step(grading, logits_of(1), (asking(keep="old"), 0, PROMPT, 1))
    step(grading, logits_of(1), (asking(keep="used"), 0, PROMPT, 1))
    for number in range(KEPT - 1):
        step(
            grading,
            logits_of(1),
            (asking(keep=str(number)), 0, PROMPT, 1),
        )
        step(grading, logits_of(1), (asking(against="used"), 0, PROMPT, 1))
    late = asking(against="old")
    beside = asking(against="used")
    ((refused, why),) = step(grading, logits_of(2), (late, 0, PROMPT, 1), (beside, 0, PROMPT, 1))
    assert refused is late
    assert "'old'" in why
    assert beside.graded is not None
    assert late.graded is None


def test_a_prompt_that_is_computed_again_after_a_preemption_is_graded_once() -> None:
    grading = Grading()
    tracked = asking()
    step(grading, logits_of(1), (tracked, 0, PROMPT, 1))
    assert tracked.graded is not None
    first = tracked.graded()
    step(grading, logits_of(1, seed=1), (tracked, 0, PROMPT, 1))
    assert tracked.graded() == first


@pytest.mark.parametrize("rows", [1, 3])
def test_logits_of_another_step_are_not_graded(rows: int) -> None:
    grading = Grading()
    tracked = asking()
    ((refused, why),) = step(grading, logits_of(rows), (tracked, 0, PROMPT, 1), (None, 9, 1, 1))
    assert refused is tracked
    assert "expected 2 rows" in why
    assert tracked.graded is None


def test_a_token_that_the_model_does_not_have_is_refused_before_it_is_looked_up() -> None:
    grading = Grading()
    tracked = asking(token_ids=(3, VOCABULARY))
    ((_, why),) = step(grading, logits_of(1), (tracked, 0, PROMPT, 1))
    assert "[50] are outside the vocabulary of 50" in why


def test_a_non_finite_grade_fails() -> None:
    grading = Grading()
    tracked = asking()
    step(grading, torch.full((1, VOCABULARY), torch.nan), (tracked, 0, PROMPT, 1))
    assert "not finite" in lacking(tracked)


def test_only_the_first_logits_after_a_plan_are_the_steps() -> None:
    """Dummy runs come before any plan; logits of prompt tokens come after the sampler's."""
    model = torch.nn.Module()
    grading = Grading()
    tracked = asking()
    model.compute_logits = lambda rows: rows
    tap(model, grading.take)
    model.compute_logits(logits_of(9))
    view = view_of(("0", 0, PROMPT))
    grading.plan(batch_of(view, {"0": tracked}), view)
    sampled = model.compute_logits(logits_of(1))
    model.compute_logits(logits_of(1, seed=1))
    assert tracked.graded is not None
    np.testing.assert_allclose(tracked.graded(), truth(sampled)[0, [3, 7]], atol=1e-6)


HIDDEN = 8
BLOCK = 4
TOKENS = 10
BELOW, ABOVE = (
    StoredCapture(sites={"post_block": [layer]}, positions="all", tag="t") for layer in (1, 3)
)


def patch(layers: Sequence[int], positions: PositionSelector = "all") -> StoredSteering:
    return StoredSteering(
        layers=list(layers),
        hook="post_block",
        positions=positions,
        family="replace",
        tensors=["zeros"],
        numbers=[1.0],
    )


def cell(
    layer: int = 2, run: str = "j.0.base", at: Sequence[int] | None = None, **fields: Any
) -> RankSpec:
    """Patched at position 6 of `at`, or of the layer where it may be entered."""
    fields = {
        "rows": steering_rows([patch(at or [layer], [6])]),
        "first_affected": 6,
        "entry": EntryPoint(run=run, layer=layer),
    } | fields
    return RankSpec(
        **{
            "version": "",
            "job": "c",
            "request": 0,
            "attempt": 1,
            "prompt_tokens": TOKENS,
            "digest": "d",
        }
        | fields
    )


def begins(*step: tuple[RankSpec | None, int, int]) -> int:
    """`(spec, first position, rows)` of each request."""
    return first_layer(
        [(spec, RequestRows("", 0, count, first)) for spec, first, count in step], BLOCK
    )


WHOLE = (0, TOKENS)
FROM_BLOCK = (4, TOKENS - 4)


@pytest.mark.parametrize(
    ("step", "first"),
    [
        ([(cell(5), *FROM_BLOCK)], 5),
        # the lowest layer that one of the cells patches
        ([(cell(5), *FROM_BLOCK), (cell(2), 6, 4), (cell(7), *FROM_BLOCK)], 2),
        # blocks before the first that is touched are filled in full
        ([(cell(first_affected=3, rows=steering_rows([patch([2], [3])])), *WHOLE)], 2),
        ([(cell(first_affected=4, rows=steering_rows([patch([2], [4])])), *WHOLE)], 0),
        ([(cell(first_affected=-1, rows=[]), *WHOLE)], 2),
        # a job's own runs have the layers of all its cells, and others may not
        ([(cell(5, "j.0.base"), *FROM_BLOCK), (cell(2, "j.7.base"), *FROM_BLOCK)], 2),
        ([(cell(5, "j.0.base"), *FROM_BLOCK), (cell(2, "k.0.base"), *FROM_BLOCK)], 0),
        ([(cell(at, f"{job}.0.base"), *FROM_BLOCK) for job in "jk" for at in (2, 5)], 2),
        ([(cell(5), *FROM_BLOCK), (cell(captures=[ABOVE]), *FROM_BLOCK)], 2),
        # one request needs the layers below
        *(
            ([(cell(5), *FROM_BLOCK), beside], 0)
            for beside in (
                (None, 3, 1),  # an ordinary one
                (cell(entry=None), *FROM_BLOCK),
                (cell(), 4, 3),  # a chunk
                (cell(), *WHOLE),  # shared blocks
                (cell(captures=[BELOW]), *FROM_BLOCK),
                (cell(at=[2, 1]), *FROM_BLOCK),  # patched below
                (cell(0), *FROM_BLOCK),
            )
        ),
    ],
)
def test_a_step_of_cells_begins_at_the_lowest_layer_whose_rows_it_needs(
    step: list[tuple[RankSpec | None, int, int]], first: int
) -> None:
    assert begins(*step) == first


class PairLayer(nn.Module):
    """As Llama's: adds what was deferred, and defers its own."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> Any:
        self.seen.append((hidden_states.clone(), None if residual is None else residual.clone()))
        # in place, as fused norms do
        residual = hidden_states if residual is None else residual.add_(hidden_states)
        return 0.5 * residual, residual


class SingleLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.Tensor, None]] = []

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        self.seen.append((hidden_states.clone(), None))
        return hidden_states.mul_(1.5)


class Model(nn.Module):
    """The layers of one stage; those of others are placeholders."""

    def __init__(self, kind: type[nn.Module], layers: range) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            kind() if number in layers else nn.Identity() for number in range(6)
        )
        self.held = [self.layers[number] for number in layers]

    def forward(self, hidden: torch.Tensor) -> Any:
        if isinstance(self.held[0], SingleLayer):
            for layer in self.held:
                hidden = layer(hidden)
            return hidden
        residual = None
        for layer in self.held:
            hidden, residual = layer(torch.arange(len(hidden)), hidden, residual=residual)
        return hidden, residual


def gated(kind: type[nn.Module], layers: range = range(6)) -> tuple[Model, LayerGate]:
    model = Model(kind, layers)
    adapter = SimpleNamespace(
        variant=SimpleNamespace(layers="layers"),
        architecture="",
        tap=lambda *_: SimpleNamespace(kind="pair" if kind is PairLayer else "single"),
    )
    return model, install_gate(model, adapter)  # type: ignore[arg-type]


class Runs:
    """Row `position` of a layer is `layer · 100 + position`."""

    def __init__(self, *keys: str) -> None:
        self._keys = keys

    def rows(self, key: str, hook: str, layer: int, positions: Sequence[int]) -> torch.Tensor:
        if key not in self._keys or max(positions) >= TOKENS:
            raise LookupError(f"{key} is not here")
        assert hook == "pre_attn"
        return (100.0 * layer + torch.tensor(positions, dtype=torch.float32))[:, None].expand(
            -1, HIDDEN
        )


class Failures:
    """The reasons of the requests that failed, in the place of `Requests`."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def guard(self, *_: Any) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def fail(self, tracked: Tracked, why: str, kind: str) -> None:
        assert kind == "intervention_failed"
        self.reasons.append(f"{tracked.spec.request}: {why}")


def entering(gate: LayerGate, *keys: str) -> Reentry:
    cpu = torch.device("cpu")
    made = Reentry(Failures(), gate, Runs(*keys), HIDDEN, torch.float32, cpu)  # type: ignore[arg-type]
    made.block_size = BLOCK
    return made


def plan(entering: Reentry, *step: tuple[RankSpec, int, int]) -> tuple[list[str], int]:
    """The reasons of the requests that failed, and how many rows the step has."""
    view = view_of(*((str(number), first, count) for number, (_, first, count) in enumerate(step)))
    tracked = {str(number): Tracked(spec) for number, (spec, _, _) in enumerate(step)}
    entering.plan(batch_of(view, tracked), view)
    return cast("Failures", entering._requests).reasons, view.num_rows


@pytest.mark.parametrize("kind", [PairLayer, SingleLayer])
def test_reentry_skips_lower_layers_and_restores_rows_exactly(kind: type[nn.Module]) -> None:
    model, gate = gated(kind)
    forward = entering(gate, "j.0.base", "j.1.base")
    failed, rows = plan(forward, (cell(3), *FROM_BLOCK), (cell(4, "j.1.base"), 8, 2))
    assert failed == []
    assert rows == 8
    model(torch.randn(rows + 2, HIDDEN))  # padded
    assert [len(layer.seen) for layer in model.held] == [0, 0, 0, 1, 1, 1]
    ((hidden, residual),) = model.held[3].seen
    stream = hidden if residual is None else hidden + residual
    assert stream[:, 0].tolist() == [
        304.0,
        305.0,
        306.0,
        307.0,
        308.0,
        309.0,
        308.0,
        309.0,
        0.0,
        0.0,
    ]
    # −0: a zero of the stream keeps its sign
    assert residual is None or bool(hidden.signbit().all())
    assert gate.skipped == 0  # the plane counts
    forward.drain(RanStep(None, None))
    model(torch.randn(rows, HIDDEN))
    assert [len(layer.seen) for layer in model.held] == [1, 1, 1, 2, 2, 2]


def test_each_stage_leaves_out_its_own_layers_and_hands_on_two_tensors() -> None:
    step = [(cell(4), *FROM_BLOCK)]
    model, gate = gated(PairLayer, range(3))
    forward = entering(gate)
    assert plan(forward, *step)[0] == []  # the rows are on the next stage
    hidden, residual = model(torch.randn(6, HIDDEN))
    assert hidden.shape == residual.shape == (6, HIDDEN)
    assert not any(layer.seen for layer in model.held)
    later, gate = gated(PairLayer, range(3, 6))
    forward = entering(gate, "j.0.base")
    plan(forward, *step)
    later(hidden)
    assert [len(layer.seen) for layer in later.held] == [0, 1, 1]


def test_a_rank_without_a_requests_rows_fails_it_and_skips_the_same_layers() -> None:
    """Ranks of a stage that left out other layers would wait for each other."""  # field case 28
    _, gate = gated(PairLayer)
    forward = entering(gate, "j.0.base")
    gone = cell(3, "j.1.base", request=1)
    long = cell(3, request=2, prompt_tokens=TOKENS + 2)
    failed, _ = plan(forward, (cell(3), *FROM_BLOCK), (gone, *FROM_BLOCK), (long, 6, 6))
    assert [why.split(":")[0] for why in failed] == ["2", "1"]
    assert gate.begin == 3
    assert gate.stream is not None
    assert gate.stream[:, 0].tolist() == [*range(304, 310), *[0.0] * 12]
    _, other = gated(PairLayer)
    assert plan(entering(other), (cell(3), *FROM_BLOCK))[0] == ["0: j.0.base is not here"]
    assert other.begin == 3


def test_reentry_decisions_ignore_rank_state() -> None:
    """A request that failed here may run on elsewhere."""
    _, gate = gated(PairLayer)
    forward = entering(gate, "j.0.base")
    tracked = Tracked(msgspec.structs.replace(cell(3)), failure="no", reported=True)
    view = view_of(("0", 4, 6))
    forward.plan(batch_of(view, {"0": tracked}), view)
    assert gate.begin == 3
