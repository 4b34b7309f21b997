"""Is the number in a cell the metric that was asked for?

Worked out by hand, and refused where it would mean nothing.
"""

import math

import pytest

from midstream.schemas.jobs.receipts import Receipt
from midstream_lab.records.sweep_units import nodes_of
from midstream_lab.records.sweeps import StoredPair
from midstream_lab.results.sweep_metrics import (
    Grades,
    grades,
    in_nats,
    noise_floor,
    recovered,
    useless_baseline,
)
from midstream_lab.run.verdict import graded, unverified

PAIR = StoredPair(base=[1], source=[2], columns=[], answer=[10, 11], foil=[12])
#: The prompt's next token: 10 or 12; behind 10: 11.
GRADED = [[-1.0, -3.0], [-0.5]]


def receipt(rank: int, node: int = 0, **changes: object) -> Receipt:
    fields: dict[str, object] = {
        "version": "0",
        "worker": "w",
        "boot": "b",
        "job": "j",
        "request": node,
        "attempt": 1,
        "rank": rank,
        "world": 4,
        "tp": rank % 2,
        "pp": rank // 2,
        "step": 1,
        "actions": 1,
        "checksum": f"{rank // 2}",
        "status": "ok",
        "graded": GRADED[node] if rank == 2 else [],
    }
    return Receipt(**(fields | changes))  # type: ignore[arg-type]


def told(**changes: object) -> list[list[Receipt]]:
    """Of both nodes the receipts of four ranks; rank 3's of the second with some changes."""
    return [
        [receipt(rank, node, **(changes if (rank, node) == (3, 1) else {})) for rank in range(4)]
        for node in range(2)
    ]


def test_an_answer_of_several_tokens_has_the_sum_of_its_log_probabilities() -> None:
    assert nodes_of(PAIR) == [((), (10, 12)), ((10,), (11,))]
    assert grades(PAIR, nodes_of(PAIR), GRADED) == Grades(-1.5, -3.0)


def test_the_divergence_follows_the_token_ids_of_the_first_node() -> None:
    assert grades(PAIR, nodes_of(PAIR), [[-1.0, -3.0, 0.25], [-0.5]], compared=True) == Grades(
        -1.5, -3.0, 0.25
    )


@pytest.mark.parametrize(
    "graded",
    [[[-1.0], [-0.5]], [[-1.0, -3.0], []], [[-1.0, math.nan], [-0.5]], [[-1.0, -math.inf], [-0.5]]],
)
# field case 33
def test_missing_answer_logprobs_give_no_value(graded: list[list[float]]) -> None:
    with pytest.raises(ValueError, match=r"requested|not finite"):
        grades(PAIR, nodes_of(PAIR), graded)


def test_each_metric_is_made_of_its_parts() -> None:
    full = Grades(-1.5, -3.0, 0.25)
    alone = Grades(-1.5, None)
    assert [in_nats(metric, full) for metric in ("logprob", "logit_diff", "recovered", "kl")] == [
        -1.5,
        1.5,
        1.5,
        0.25,
    ]
    assert in_nats("recovered", alone) == -1.5
    with pytest.raises(ValueError, match="logit_diff"):
        in_nats("logit_diff", alone)
    with pytest.raises(ValueError, match="kl"):
        in_nats("kl", alone)


def test_the_share_that_was_recovered_is_0_without_and_1_with_all() -> None:
    assert [recovered(value, -2.0, 4.0) for value in (-2.0, 1.0, 4.0, 7.0)] == [0.0, 0.5, 1.0, 1.5]


def test_the_noise_floor_is_the_largest_change_in_the_metrics_units() -> None:
    assert noise_floor("logit_diff", [1.0, 1.5, 0.25], 1.0) == 0.75
    assert noise_floor("recovered", [0.01, -0.02], 5.0) == 0.02
    assert noise_floor("kl", [], 0.0) is None
    assert noise_floor("kl", [0.1], None) is None


# field case 35
def test_a_baseline_is_useless_below_a_tenth_of_a_nat_or_ten_times_the_noise() -> None:
    assert useless_baseline(1.0, 1.2, []) == ""
    assert useless_baseline(1.0, 1.2, [1.01, 0.99]) == ""
    assert (
        "1.0000 nats for the prompt to patch and 1.0500 for the other, a difference of 0.0500"
    ) in useless_baseline(1.0, 1.05, [])
    assert "0.3000 are needed (a no-op patch changes the value by 0.0300)" in useless_baseline(
        1.0, 1.2, [1.03]
    )


def test_a_unit_counts_when_all_ranks_confirm_it() -> None:
    assert unverified(told(), 4) == ""
    reported = [graded(receipts) for receipts in told()]
    assert grades(PAIR, nodes_of(PAIR), reported) == Grades(-1.5, -3.0)


@pytest.mark.parametrize(
    ("receipts", "why"),
    [
        (told(status="error", message="no such row"), "rank 3 (stage 1): no such row"),
        (told(status="partial"), "no reason given"),
        *(
            (told(**changes), "stage 1 do not report the same")
            for changes in ({"checksum": "other"}, {"applied": 7}, {"epoch": 2})
        ),
        ([of_node[:3] for of_node in told()], "3 of 4 ranks reported"),
    ],
)
# field case 31
def test_a_unit_that_one_rank_does_not_confirm_has_no_value(
    receipts: list[list[Receipt]], why: str
) -> None:
    assert why in unverified(receipts, 4)
