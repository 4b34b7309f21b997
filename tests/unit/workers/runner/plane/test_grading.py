"""What a rank says of the next token after a prompt, and when it says that it cannot."""

import numpy as np
import pytest
import torch
from rank_kit import view_of

from midstream.schemas.requests.specs import Grade, RankSpec
from midstream.workers.runner.base.engine_step import StepView
from midstream.workers.runner.plane.grading import KEPT, Grading, lacking, tap
from midstream.workers.runner.plane.step_parts import StepBatch
from midstream.workers.runner.rows.planner import Tracked

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


def step(
    grading: Grading, logits: torch.Tensor, *windows: tuple[Tracked | None, int, int, int]
) -> list[tuple[Tracked, str]]:
    """`(request, or a plain one, first position, rows, logits)` in batch order."""
    found = view_of(*((str(n), first, count) for n, (_, first, count, _) in enumerate(windows)))
    view = StepView(found.ids, found.counts, found.positions, [window[3] for window in windows])
    mine = {str(n): tracked for n, (tracked, *_) in enumerate(windows) if tracked is not None}
    grading.plan(StepBatch(view, mine), view)
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
    grading, logits = Grading(), logits_of(sum(window[-1] for window in windows))
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
    grading, logits = Grading(), logits_of(3)
    one, other, both = (
        asking(0, keep="one"),
        asking(1, (), keep="other"),
        asking(2, (4,), keep="third", against="one"),
    )
    assert step(grading, logits, *((tracked, 0, PROMPT, 1) for tracked in (one, other, both))) == []
    assert both.graded is not None
    logprobs = truth(logits)
    kl = (np.exp(logprobs[0]) * (logprobs[0] - logprobs[2])).sum()
    np.testing.assert_allclose(both.graded(), [logprobs[2, 4], kl], atol=1e-6)
    cells = [asking(10 + n, (n,), against="other" if n % 2 else "one") for n in range(5)]
    later = logits_of(5, seed=1)
    assert step(grading, later, *((cell, 0, PROMPT, 1) for cell in cells)) == []
    for number, cell in enumerate(cells):
        kept, mine = logprobs[number % 2], truth(later)[number]
        assert cell.graded is not None
        np.testing.assert_allclose(
            cell.graded(), [mine[number], (np.exp(kept) * (kept - mine)).sum()], atol=1e-6
        )


def test_tokens_without_probability_add_nothing_to_a_divergence() -> None:
    grading, logits = Grading(), logits_of(2)
    logits[:, 5] = -torch.inf
    base, cell = asking(0, keep="base"), asking(1, against="base")
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
    late, beside = asking(against="old"), asking(against="used")
    ((refused, why),) = step(grading, logits_of(2), (late, 0, PROMPT, 1), (beside, 0, PROMPT, 1))
    assert refused is late
    assert "'old'" in why
    assert beside.graded is not None
    assert late.graded is None


def test_a_prompt_that_is_computed_again_after_a_preemption_is_graded_once() -> None:
    grading, tracked = Grading(), asking()
    step(grading, logits_of(1), (tracked, 0, PROMPT, 1))
    assert tracked.graded is not None
    first = tracked.graded()
    step(grading, logits_of(1, seed=1), (tracked, 0, PROMPT, 1))
    assert tracked.graded() == first


@pytest.mark.parametrize("rows", [1, 3])
def test_logits_of_another_step_are_not_graded(rows: int) -> None:
    grading, tracked = Grading(), asking()
    ((refused, why),) = step(grading, logits_of(rows), (tracked, 0, PROMPT, 1), (None, 9, 1, 1))
    assert refused is tracked
    assert "expected 2 rows" in why
    assert tracked.graded is None


def test_a_token_that_the_model_does_not_have_is_refused_before_it_is_looked_up() -> None:
    grading, tracked = Grading(), asking(token_ids=(3, VOCABULARY))
    ((_, why),) = step(grading, logits_of(1), (tracked, 0, PROMPT, 1))
    assert "[50] are outside the vocabulary of 50" in why


def test_a_non_finite_grade_fails() -> None:
    grading, tracked = Grading(), asking()
    step(grading, torch.full((1, VOCABULARY), torch.nan), (tracked, 0, PROMPT, 1))
    assert "not finite" in lacking(tracked)


def test_only_the_first_logits_after_a_plan_are_the_steps() -> None:
    """Dummy runs come before any plan; logits of prompt tokens come after the sampler's."""
    model, grading, tracked = torch.nn.Module(), Grading(), asking()
    model.compute_logits = lambda rows: rows
    tap(model, grading.take)
    model.compute_logits(logits_of(9))
    view = view_of(("0", 0, PROMPT))
    grading.plan(StepBatch(view, {"0": tracked}), view)
    sampled = model.compute_logits(logits_of(1))
    model.compute_logits(logits_of(1, seed=1))
    assert tracked.graded is not None
    np.testing.assert_allclose(tracked.graded(), truth(sampled)[0, [3, 7]], atol=1e-6)
