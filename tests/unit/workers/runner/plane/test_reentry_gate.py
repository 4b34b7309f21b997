"""At which layer does a step's forward begin, and what do the layers of a rank then see?"""

import contextlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch
from rank_kit import view_of
from torch import nn

from midstream.schemas.prompts.selectors import PositionSelector
from midstream.schemas.requests.specs import EntryPoint, RankSpec, StoredCapture, StoredSteering
from midstream.workers.runner.base.engine_step import RequestRows
from midstream.workers.runner.plane.reentry import (
    Reentry,
    ReentryGate,
    first_layer,
    install_gate,
)
from midstream.workers.runner.plane.step_parts import RanStep, StepBatch
from midstream.workers.runner.rows.planner import Tracked

HIDDEN, BLOCK, PROMPT = 8, 4, 10
CAPTURE = StoredCapture(sites={"post_block": [3]}, positions="all", tag="t")


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
        "steering": [patch(at or [layer], [6])],
        "first_affected": 6,
        "entry": EntryPoint(run=run, layer=layer),
    } | fields
    return RankSpec(
        **{
            "version": "",
            "job": "c",
            "request": 0,
            "attempt": 1,
            "prompt_tokens": PROMPT,
            "digest": "d",
        }
        | fields
    )


def begins(*step: tuple[RankSpec | None, int, int]) -> int:
    """`(spec, first position, rows)` of each request."""
    return first_layer(
        [(spec, RequestRows("", 0, count, first)) for spec, first, count in step], BLOCK
    )


WHOLE = (0, PROMPT)
FROM_BLOCK = (4, PROMPT - 4)


def test_a_step_of_cells_begins_at_the_lowest_layer_that_one_of_them_patches() -> None:
    assert begins((cell(5), *FROM_BLOCK)) == 5
    assert begins((cell(5), *FROM_BLOCK), (cell(2), 6, 4), (cell(7), *FROM_BLOCK)) == 2


@pytest.mark.parametrize(
    "beside",
    [
        (None, 3, 1),
        (cell(entry=None), *FROM_BLOCK),
        (cell(), 4, 3),
        (cell(), *WHOLE),
        (cell(captures=[CAPTURE]), *FROM_BLOCK),
        (cell(at=[2, 1]), *FROM_BLOCK),
        (cell(0), *FROM_BLOCK),
    ],
    ids=[
        "an ordinary one",
        "no entry",
        "a chunk",
        "shared blocks",
        "a capture",
        "patched below",
        "layer 0",
    ],
)
def test_a_step_begins_at_the_first_layer_when_one_request_needs_the_layers_below(beside) -> None:
    assert begins((cell(5), *FROM_BLOCK), beside) == 0


def test_blocks_before_the_first_that_is_touched_are_filled_in_full() -> None:
    assert begins((cell(first_affected=3, steering=[patch([2], [3])]), *WHOLE)) == 2
    assert begins((cell(first_affected=4, steering=[patch([2], [4])]), *WHOLE)) == 0
    assert begins((cell(first_affected=-1, steering=[]), *WHOLE)) == 2


def test_a_jobs_own_runs_have_the_layers_of_all_its_cells_and_others_may_not() -> None:
    assert begins((cell(5, "j.0.base"), *FROM_BLOCK), (cell(2, "j.7.base"), *FROM_BLOCK)) == 2
    assert begins((cell(5, "j.0.base"), *FROM_BLOCK), (cell(2, "k.0.base"), *FROM_BLOCK)) == 0
    both = [(cell(layer, f"{job}.0.base"), *FROM_BLOCK) for job in "jk" for layer in (2, 5)]
    assert begins(*both) == 2


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


def gated(kind: type[nn.Module], layers: range = range(6)) -> tuple[Model, ReentryGate]:
    model = Model(kind, layers)
    adapter = SimpleNamespace(
        layers="layers",
        architecture="",
        tap=lambda *_: SimpleNamespace(kind="pair" if kind is PairLayer else "single"),
    )
    return model, install_gate(model, adapter)  # type: ignore[arg-type]


class Runs:
    """Row `position` of a layer is `layer · 100 + position`."""

    def __init__(self, *keys: str) -> None:
        self._keys = keys

    def rows(self, key: str, hook: str, layer: int, positions: Sequence[int]) -> torch.Tensor:
        if key not in self._keys or max(positions) >= PROMPT:
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


def entering(gate: ReentryGate, *keys: str) -> Reentry:
    cpu = torch.device("cpu")
    made = Reentry(Failures(), gate, Runs(*keys), HIDDEN, torch.float32, cpu)  # type: ignore[arg-type]
    made.block_size = BLOCK
    return made


def plan(entering: Reentry, *step: tuple[RankSpec, int, int]) -> tuple[list[str], int]:
    """The reasons of the requests that failed, and how many rows the step has."""
    view = view_of(*((str(number), first, count) for number, (_, first, count) in enumerate(step)))
    tracked = {str(number): Tracked(spec) for number, (spec, _, _) in enumerate(step)}
    entering.plan(StepBatch(view, tracked), view)
    return cast("Failures", entering._requests).reasons, view.num_rows


@pytest.mark.parametrize("kind", [PairLayer, SingleLayer])
def test_reentry_skips_lower_layers_and_restores_rows_exactly(kind: type[nn.Module]) -> None:
    model, gate = gated(kind)
    forward = entering(gate, "j.0.base", "j.1.base")
    failed, rows = plan(forward, (cell(3), *FROM_BLOCK), (cell(4, "j.1.base"), 8, 2))
    assert (failed, rows) == ([], 8)
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
    assert forward.skipped == 3 * rows
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
    long = cell(3, request=2, prompt_tokens=PROMPT + 2)
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
    forward.plan(StepBatch(view, {"0": tracked}), view)
    assert gate.begin == 3
