"""Do the laws hold for rows that obey them, and is a wrong adapter named where they do not?"""

import math
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import distributed
from wait_kit import warn_if_late

from midstream.schemas.prompts.selectors import HOOKS, Hook
from midstream.workers.runner.certificate import together
from midstream.workers.runner.certificate.laws import (
    STREAM,
    JudgedShape,
    LawFinding,
    combine,
    elementwise,
    judge_boundary,
    judge_edit,
    judge_layer,
    judge_module,
    judge_parts,
    judge_same,
    rowwise,
    verdict,
)
from midstream.workers.runner.certificate.together import FailedAloneError, StageRanks

LAYERS = 4
ROWS = 6
HIDDEN = 32
EPS = torch.finfo(torch.bfloat16).eps
SEQUENTIAL: Mapping[Hook, Mapping[Hook, float]] = {
    "post_attn": {"pre_attn": 1.0, "attn_out": 1.0},
    "post_block": {"post_attn": 1.0, "mlp_out": 1.0},
}
PARALLEL: Mapping[Hook, Mapping[Hook, float]] = {
    "post_block": {"pre_attn": 1.0, "attn_out": 1.0, "mlp_out": 1.0}
}
Rows = dict[tuple[str, int], torch.Tensor]


def rounded(rows: torch.Tensor) -> torch.Tensor:
    return rows.to(torch.bfloat16).float()


def mlp(rows: torch.Tensor) -> torch.Tensor:
    return rounded(torch.tanh(rows.roll(1, -1)) * 2)


def norm(rows: torch.Tensor) -> torch.Tensor:
    return rounded(rows / rows.square().mean(-1, keepdim=True).sqrt())


def model(
    laws: Mapping[Hook, Mapping[Hook, float]],
    added: Mapping[tuple[str, int], torch.Tensor] | None = None,
    seed: int = 0,
) -> tuple[Rows, torch.Tensor]:
    """Rows of a tiny model in bf16, each before its edit, and what leaves the last layer."""
    torch.manual_seed(seed)
    found: Rows = {}

    def met(hook: str, layer: int, rows: torch.Tensor) -> torch.Tensor:
        found[hook, layer] = rows
        return rounded(rows + added[hook, layer]) if added and (hook, layer) in added else rows

    stream = rounded(torch.randn(ROWS, HIDDEN))
    tables = torch.randn(LAYERS, HIDDEN, HIDDEN) / 6
    for layer in range(LAYERS):
        stream = met("pre_attn", layer, stream)
        entered = stream
        branch = met("attn_out", layer, rounded(norm(stream) @ tables[layer]))
        if "post_attn" in laws:
            factor = laws["post_attn"]["attn_out"]
            stream = met("post_attn", layer, rounded(stream + factor * branch))
        out = met("mlp_out", layer, mlp(met("mlp_in", layer, norm(stream))))
        factor = laws["post_block"]["mlp_out"]
        stream = (
            rounded(stream + factor * out)
            if "post_attn" in laws
            else rounded(entered + branch + out)
        )
        stream = met("post_block", layer, stream)
    return found, stream


def judged(
    shape: JudgedShape, rows: Rows, of_mlp: Callable[[int], Sequence[LawFinding]]
) -> list[LawFinding]:
    """The findings of all layers; `of_mlp`: those about a layer's MLP."""
    found: list[LawFinding] = []
    for layer in range(LAYERS):
        found += judge_layer(shape, lambda hook, number: rows[hook, number], layer)
        found += of_mlp(layer)
        if layer + 1 < LAYERS:
            found.append(
                judge_boundary(shape, rows["post_block", layer], rows["pre_attn", layer + 1], layer)
            )
    return found


def findings(
    rows: Rows, final: torch.Tensor, laws: Mapping[Hook, Mapping[Hook, float]] = SEQUENTIAL
) -> tuple[list[LawFinding], JudgedShape]:
    shape = JudgedShape([hook for hook in HOOKS if (hook, 0) in rows], EPS, lambda _: laws)

    def of_mlp(layer: int) -> list[LawFinding]:
        made = mlp(rows["mlp_in", layer])
        out = rows["mlp_out", layer]
        return [judge_module(shape, made, out, layer, ("mlp_in", "mlp_out"))]

    found = judged(shape, rows, of_mlp)
    last = rowwise(rows["post_block", LAYERS - 1], final, shape.tolerance("logits"))
    return [*found, LawFinding("logits", ("post_block",), LAYERS - 1, last, "logits")], shape


def absent(
    rows: Rows, final: torch.Tensor, laws: Mapping[Hook, Mapping[Hook, float]] = SEQUENTIAL
) -> dict[Hook, str]:
    found, shape = findings(rows, final, laws)
    return verdict(shape.hooks, found, LAYERS)[0]


@pytest.mark.parametrize("laws", [SEQUENTIAL, PARALLEL], ids=["sequential", "parallel"])
def test_rows_that_obey_the_laws_prove_every_hook(
    laws: Mapping[Hook, Mapping[Hook, float]],
) -> None:
    assert absent(*model(laws), laws) == {}


def test_a_stated_multiplier_is_part_of_the_law() -> None:
    scaled: Mapping[Hook, Mapping[Hook, float]] = {
        "post_attn": {"pre_attn": 1.0, "attn_out": 0.25},
        "post_block": {"post_attn": 1.0, "mlp_out": 0.25},
    }
    assert absent(*model(scaled), scaled) == {}
    assert "post_attn" in absent(*model(scaled), SEQUENTIAL), "the wrong multiplier"


def of_parts(rows: Rows) -> dict[Hook, str]:
    """What is absent of a model whose MLP has several parts, and so no `mlp_out`."""
    shape = JudgedShape(
        [hook for hook in HOOKS if hook != "mlp_out"],
        EPS,
        lambda _: {"post_attn": {"pre_attn": 1.0, "attn_out": 1.0}},
    )

    def of_mlp(layer: int) -> Sequence[LawFinding]:
        made = mlp(rows["mlp_in", layer])
        stream = rows["post_attn", layer]
        return judge_parts(shape, made, stream, rows["post_block", layer], layer)

    return verdict(shape.hooks, judged(shape, rows, of_mlp), LAYERS)[0]


@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_an_mlp_without_mlp_out_is_proven_by_what_it_adds_to_the_stream(factor: float) -> None:
    rows, _ = model({**SEQUENTIAL, "post_block": {"post_attn": 1.0, "mlp_out": factor}})
    assert of_parts(rows) == {}
    assert of_parts(shifted(rows, "mlp_in")).keys() == {"mlp_in"}
    faint, _ = model({**SEQUENTIAL, "post_block": {"post_attn": 1.0, "mlp_out": 1e-4}})
    assert of_parts(faint).keys() == {"mlp_in"}, "rounding hides it"


def shifted(rows: Rows, hook: Hook) -> Rows:
    return rows | {(hook, (layer + 1) % LAYERS): rows[hook, layer] for layer in range(LAYERS)}


def branch(rows: Rows, hook: Hook) -> Rows:
    other: dict[Hook, Hook] = {
        "pre_attn": "attn_out",
        "post_attn": "attn_out",
        "post_block": "mlp_out",
    }
    return rows | {(hook, layer): rows[other[hook], layer] for layer in range(LAYERS)}


def half(rows: Rows, hook: Hook) -> Rows:
    """The other tensor of the pair, without the branch."""
    before: dict[Hook, Hook] = {"post_attn": "pre_attn", "post_block": "post_attn"}
    return rows | {(hook, layer): rows[before[hook], layer] for layer in range(LAYERS)}


@pytest.mark.parametrize(
    ("wrong", "hook", "named"),
    [
        (shifted, "attn_out", {"attn_out"}),
        (shifted, "mlp_in", {"mlp_in"}),
        (shifted, "mlp_out", {"mlp_out", "mlp_in"}),
        (shifted, "post_attn", {"post_attn", "attn_out"}),
        (branch, "post_attn", {"post_attn", "attn_out"}),
        (half, "post_attn", {"post_attn", "attn_out"}),
    ],
)
def test_a_wrong_tap_is_named_and_no_other_but_what_only_it_could_prove(
    wrong: Callable[[Rows, Hook], Rows], hook: Hook, named: set[str]
) -> None:
    rows, final = model(SEQUENTIAL)
    found = absent(wrong(rows, hook), final)
    assert found.keys() == named
    assert "fails in layer" in found[hook]


@pytest.mark.parametrize(
    ("wrong", "hook"),
    [
        (shifted, "pre_attn"),
        (shifted, "post_block"),
        (branch, "pre_attn"),
        (branch, "post_block"),
        (half, "post_block"),
    ],
)
def test_a_wrong_stream_is_named(wrong: Callable[[Rows, Hook], Rows], hook: Hook) -> None:
    rows, final = model(SEQUENTIAL)
    assert hook in absent(wrong(rows, hook), final)


@pytest.mark.parametrize("hook", HOOKS)
def test_rows_of_zeros_or_not_finite_prove_nothing(hook: Hook) -> None:
    rows, final = model(SEQUENTIAL)
    for value in (0.0, math.nan, math.inf):
        dead = rows | {(hook, layer): torch.full((ROWS, HIDDEN), value) for layer in range(LAYERS)}
        assert hook in absent(dead, final), value


def test_a_branch_that_rounding_hides_is_not_proven() -> None:
    rows, _ = model(SEQUENTIAL)
    stream = rounded(torch.full((ROWS, HIDDEN), 1000.0))
    for layer in range(LAYERS):
        rows |= {(hook, layer): stream for hook in ("pre_attn", "post_attn", "post_block")}
        rows["attn_out", layer] = torch.full((ROWS, HIDDEN), 0.5)
    assert "visible" in absent(rows, stream)["attn_out"]


def test_a_hook_without_its_neighbours_is_not_proven() -> None:
    rows, _ = model(SEQUENTIAL)
    only = {key: value for key, value in rows.items() if key[0] in ("pre_attn", "post_block")}
    shape = JudgedShape(["pre_attn", "post_block"], EPS, lambda _: SEQUENTIAL)
    found = [
        judge_boundary(shape, only["post_block", layer], only["pre_attn", layer + 1], layer)
        for layer in range(LAYERS - 1)
    ]
    assert verdict(shape.hooks, found, LAYERS)[0] == {}
    alone = verdict(["attn_out"], [], LAYERS)[0]
    assert "pre_attn and post_attn" in alone["attn_out"]
    unshown: dict[Hook, str] = {}
    assert verdict(["attn_out"], [], LAYERS, unshown=unshown)[0] == {}
    assert unshown == alone


def added_at(hook: Hook, layer: int) -> torch.Tensor:
    vector = torch.zeros(ROWS, HIDDEN)
    vector[3] = rounded(torch.linspace(-3, 3, HIDDEN))
    return vector


def edits(
    hook: Hook, layer: int, taken: Callable[[Rows, Rows], Rows] = lambda edited, _: edited
) -> dict[Hook, str]:
    """The verdict on an edit at row 3. `taken`: what is captured of it."""
    plain, final = model(SEQUENTIAL)
    vector = added_at(hook, layer)
    edited = taken(model(SEQUENTIAL, {(hook, layer): vector})[0], plain)
    found, shape = findings(plain, final)
    entered = edited["pre_attn", layer + 1][3:4] if hook == "post_block" else None
    own = judge_edit(
        shape,
        hook,
        layer,
        edited=lambda each, at: edited[each, at][3:4],
        plain=lambda each, at: plain[each, at][3:4],
        added=vector[3:4],
        entered=entered,
    )
    if hook == "mlp_in":
        own.append(
            judge_module(
                shape,
                mlp(rounded(edited["mlp_in", layer] + vector)),
                edited["mlp_out", layer],
                layer,
                ("mlp_in", "mlp_out"),
            )
        )
    return verdict(shape.hooks, [*found, *own], LAYERS)[0]


@pytest.mark.parametrize("hook", HOOKS)
def test_an_edit_that_arrives_proves_the_hook(hook: Hook) -> None:
    assert edits(hook, 1) == {}


@pytest.mark.parametrize("hook", [hook for hook in HOOKS if hook != "mlp_in"])
def test_an_edit_that_does_not_arrive_is_blamed_on_the_hook(hook: Hook) -> None:
    assert edits(hook, 1, lambda _, plain: plain).keys() == {hook}


@pytest.mark.parametrize("hook", ["attn_out", "mlp_out", "post_attn"])
def test_an_edit_that_acts_too_early_is_blamed_on_the_hook(hook: Hook) -> None:
    def early(edited: Rows, plain: Rows) -> Rows:
        return edited | {("pre_attn", 1): plain["pre_attn", 1] + 2 * added_at(hook, 1)}

    assert hook in edits(hook, 1, early)


def test_rows_of_a_wrong_batch_slot_are_refused() -> None:
    rows, _ = model(SEQUENTIAL)
    shape = JudgedShape(HOOKS, EPS)
    right = rows["pre_attn", 2]
    wrong = rows["pre_attn", 2].roll(1, 0)
    assert judge_same(shape, "law", "pre_attn", 2, right, right).ok
    assert not judge_same(shape, "law", "pre_attn", 2, wrong, right).ok


def test_a_law_that_fails_in_one_layer_fails() -> None:
    found = [
        LawFinding("MLP", ("mlp_in", "mlp_out"), layer, figure, "module")
        for layer, figure in enumerate((0.1, 0.2, 40.0))
    ]
    (law,) = combine(found)
    assert not law.ok
    assert law.layer == 2
    assert law.failing == (2,)


def test_the_median_row_counts_only_in_layers_that_choose_experts() -> None:
    """Layer 0 is dense, layer 1 has experts: a row near a tie may be another expert's, most rows
    may not.
    """
    rows, _ = model(SEQUENTIAL)
    shape = JudgedShape(HOOKS, EPS, routes={1}.__contains__)

    def ok(layer: int, wrong: int) -> bool:
        made = mlp(rows["mlp_in", layer])
        made[:wrong] *= 1.1
        return judge_module(shape, made, rows["mlp_out", layer], layer, ("mlp_in", "mlp_out")).ok

    assert [ok(layer, 2) for layer in (0, 1)] == [False, True]
    assert [ok(layer, ROWS - 1) for layer in (0, 1)] == [False, False]


def test_rows_of_another_batch_may_differ_above_a_router_only() -> None:
    rows, _ = model(SEQUENTIAL)
    shape = JudgedShape(HOOKS, EPS, follows=lambda layer: layer >= 1)
    wrong = rows["pre_attn", 2].clone()
    wrong[:2] = 0
    assert [
        judge_same(shape, "law", "pre_attn", layer, wrong, rows["pre_attn", 2]).ok
        for layer in (0, 1)
    ] == [False, True]


def test_figures_are_relative_to_the_tolerance() -> None:
    assert elementwise(
        torch.tensor([3.0]), [torch.tensor([1.0]), torch.tensor([1.0])], 0.1
    ) == pytest.approx(2.0)
    assert rowwise(torch.tensor([[3.0, 4.4]]), torch.tensor([[3.0, 4.0]]), 0.1) == pytest.approx(
        0.8
    )
    assert rowwise(torch.zeros(0, 4), torch.zeros(0, 4), 0.1) == math.inf, "no rows prove nothing"
    assert rowwise(torch.zeros(2, 4), torch.zeros(1, 4), 0.1) == math.inf
    for two, middle in (([[1.1], [1.3]], 2.0), ([[math.inf], [math.inf]], math.inf)):
        found = rowwise(torch.tensor(two), torch.ones(2, 1), 0.1, median=True)
        assert found == pytest.approx(middle), "the mean of both"


def test_the_stream_is_what_an_engine_cannot_do_without() -> None:
    assert set(STREAM) == {"pre_attn", "post_block"}


# --- Two ranks go through parts of the certification: what one of them alone fails at ends the run
# on both, and neither waits for the other for long.

PATIENCE_S = 2.0


def _fail() -> None:
    raise ValueError("no such argument")


def _rank(rank: int, folder: Path, part: str, answers: "multiprocessing.Queue[tuple]") -> None:
    store = distributed.FileStore(str(folder / "store"), 2)
    distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    group = distributed.new_group([0, 1], backend="gloo")
    together.PATIENCE_S = PATIENCE_S
    ranks = StageRanks(SimpleNamespace(world_size=2, rank_in_group=rank, cpu_group=group))
    act = {
        "all fail": _fail,
        "none fails": lambda: None,
        "one fails": _fail if rank else lambda: None,
        "one fails and the other is in a collective call": (
            _fail if rank else lambda: distributed.all_reduce(torch.ones(1))
        ),
    }[part]
    ranks.attempt("the part before", lambda: None)
    start = time.monotonic()
    try:
        answer = ranks.attempt(part, act)
    except FailedAloneError as error:
        answer = f"{type(error).__name__}: {error}"
    answers.put((rank, answer, time.monotonic() - start))
    answers.close()
    answers.join_thread()


ALONE = "FailedAloneError: the certification failed at one fails: rank 1: no such argument"


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ("all fail", ["no such argument"] * 2),
        ("none fails", ["", ""]),
        ("one fails", [ALONE] * 2),
        (
            "one fails and the other is in a collective call",
            [
                "NoAnswerError: the certification failed at one fails and the other is in a "
                "collective call on rank 1: no such argument"
            ],
        ),
    ],
)
def test_one_rank_that_fails_ends_a_part_on_both(
    tmp_path: Path, part: str, expected: list[str]
) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    ranks = [context.Process(target=_rank, args=(n, tmp_path, part, queue)) for n in range(2)]
    for process in ranks:
        process.start()
    try:
        answers = {}
        while len(answers) < len(expected):
            rank, answer, seconds = queue.get(timeout=120)
            answers[rank] = answer
            warn_if_late(seconds, 50, "the collective call would give up after 60")
        assert [answers[rank] for rank in sorted(answers)] == expected
    finally:
        for process in ranks:
            process.kill()
            process.join()


def test_a_part_that_is_needed_fails_the_run_of_a_single_rank() -> None:
    alone = StageRanks(SimpleNamespace(world_size=1))
    assert alone.attempt("a law", _fail) == "no such argument"
    with pytest.raises(FailedAloneError, match="rank 0: no such argument"):
        alone.attempt("rows", _fail, needed=True)
