"""How many tokens of prompts keep the pace, learned from steps of known cost."""

import pytest

from midstream.workers.runner.vllm.step_pace import LOOSE_PACE, PACE, StepPace

MOST = 2048


def learned(base_s: float, token_s: float, steps: int = 60) -> StepPace:
    """The pace after steps with and without prompts."""
    pace = StepPace(MOST)
    run(pace, base_s, token_s, steps)
    return pace


def run(pace: StepPace, base_s: float, token_s: float, steps: int) -> None:
    for _ in range(steps):
        tokens = 0 if pace.probes() else pace.tokens(PACE)
        pace.learn(tokens, base_s + token_s * tokens)


@pytest.mark.parametrize(
    ("base_s", "token_s", "tokens"),
    [(0.004, 50e-6, 80), (0.02, 0.2e-3, 100), (0.008, 10e-6, 800)],
)
def test_the_tokens_that_keep_the_pace_follow_from_the_times_of_steps(
    base_s: float, token_s: float, tokens: int
) -> None:
    pace = learned(base_s, token_s, 200)
    assert pace.tokens(PACE) == pytest.approx(tokens, rel=0.05)
    loose = tokens * (LOOSE_PACE - 1) / (PACE - 1)
    assert pace.tokens(LOOSE_PACE) == pytest.approx(min(MOST, loose), rel=0.05)


def test_prompts_that_cost_more_are_given_fewer_tokens() -> None:
    """Such as prompts with captures."""
    pace = learned(0.004, 50e-6)
    run(pace, 0.004, 500e-6, 100)
    assert pace.tokens(PACE) < 40
    run(pace, 0.004, 50e-6, 300)
    assert pace.tokens(PACE) > 65


def test_a_machine_that_becomes_slower_changes_nothing() -> None:
    pace = learned(0.004, 50e-6)
    run(pace, 0.04, 500e-6, 1000)
    assert pace.tokens(PACE) == pytest.approx(80, rel=0.1)


def test_a_step_that_was_held_up_counts_little() -> None:
    pace = learned(0.004, 50e-6, 200)
    pace.learn(160, 5.0)
    pace.learn(0, 5.0)
    assert pace.tokens(PACE) == pytest.approx(80, rel=0.3)


@pytest.mark.parametrize(
    ("base_s", "token_s", "tokens"), [(1, 1e-9, MOST), (1e-6, 1, MOST // 64 + 1)]
)
def test_the_tokens_have_bounds(base_s: float, token_s: float, tokens: int) -> None:
    pace = StepPace(MOST)
    assert pace.tokens(PACE) == MOST // 8, "before anything is known"
    for _ in range(9):
        pace.learn(0, base_s)
        pace.learn(MOST, token_s * MOST)
    assert pace.tokens(PACE) == tokens
