"""The action checksum is the same everywhere, and no difference between two ranks escapes it."""

from typing import Any, get_args

import pytest
from hypothesis import given, settings, strategies as st

from midstream.workers.runner.base.actions import (
    KINDS,
    ActionKind,
    ActionLedger,
    sealed,
    splitmix64,
)

#: One of each kind: (step, kind, *what is folded).
ONE_OF_EACH: list[tuple[Any, ...]] = [
    (5, "row_admit", "key", 0xDEADBEEF),
    (8, "row_release", "key"),
    (2**40, "steer", "job", 0, 1, "d" * 64),
    (2**40, "lora", "job", 0, 1, "e" * 64),
    (2**40, "gradient", "job", 0, 1, 0xDEADBEEF),
]
#: Checksum after each of them, one after the other.
PINNED = [
    "9d1c25dc4ed605f9",
    "2c09f23d1ad4414b",
    "cd663a3a273a9abc",
    "c760b64900e9f3df",
    "e45ba086c4455c86",
]

_TEXT = st.text(max_size=8)
_NUMBER = st.integers(0, 2**32)
#: Any action at all, with values of the kinds that are folded.
ACTION = st.sampled_from(ONE_OF_EACH).flatmap(
    lambda action: st.tuples(
        st.integers(0, 2**40),
        st.just(action[1]),
        *(_NUMBER if isinstance(value, int) else _TEXT for value in action[2:]),
    )
)


def fold(*actions: tuple[Any, ...]) -> str:
    ledger = ActionLedger()
    for step, kind, *content in actions:
        ledger.fold(step, kind, *content)
    return ledger.checksum


def test_splitmix64_gives_the_published_sequence() -> None:
    """First outputs for seed 1234567, from the reference C code (prng.di.unimi.it/splitmix64.c)."""
    gamma = 0x9E3779B97F4A7C15
    state = 1234567
    outputs = []
    for _ in range(3):
        outputs.append(splitmix64(state))
        state = (state + gamma) % (1 << 64)
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_checksums_are_pinned_over_hosts_and_versions() -> None:
    assert fold() == "0000000000000000"
    assert [fold(*ONE_OF_EACH[: n + 1]) for n in range(len(ONE_OF_EACH))] == PINNED


def test_the_table_of_kinds_is_closed() -> None:
    assert list(KINDS) == list(get_args(ActionKind)) == [action[1] for action in ONE_OF_EACH]
    ledger = ActionLedger()
    for action in [(1, "row_drop", "key"), (1, "row_admit", "key"), (1, "row_release", "key", 3)]:
        with pytest.raises(ValueError, match="is not an action"):
            ledger.fold(*action)  # type: ignore[arg-type]
    assert ledger.count == 0
    assert ledger.checksum == "0" * 16, "what is rejected is not folded"


# field case 30
@settings(max_examples=60, deadline=None)
@given(st.lists(ACTION, min_size=1, max_size=6), st.data())
def test_any_difference_in_content_kind_or_step_changes_the_checksum(
    actions: list[Any], data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(actions) - 1))
    other = data.draw(ACTION.filter(lambda action: action != actions[at]))
    assert fold(*actions) != fold(*actions[:at], other, *actions[at + 1 :])
    step, *what = actions[at]
    assert fold(*actions) != fold(*actions[:at], (step + 1, *what), *actions[at + 1 :])


# field case 30
@settings(max_examples=60, deadline=None)
@given(st.lists(ACTION, min_size=2, max_size=6), st.data())
def test_any_difference_in_order_or_number_changes_the_checksum(
    actions: list[Any], data: st.DataObject
) -> None:
    other = data.draw(st.permutations(actions))
    assert (fold(*actions) == fold(*other)) == (actions == other)
    at = data.draw(st.integers(0, len(actions) - 1))
    assert fold(*actions) != fold(*actions[:at], *actions[at + 1 :])
    assert fold(*actions) != fold(*actions[: at + 1], *actions[at:])


def test_a_new_epoch_begins_from_zero() -> None:
    ledger = ActionLedger()
    ledger.fold(1, "row_release", "key")
    first = ledger.checksum
    ledger.restart()
    assert ledger.checksum == "0" * 16
    assert ledger.count == 0
    assert ledger.epoch == 1
    ledger.fold(1, "row_release", "key")
    assert ledger.checksum == first
    assert ledger.epoch == 1


def test_results_are_in_the_checksum_of_their_receipt_alone() -> None:
    """Else a request that fails on one rank would put all later receipts out of step."""
    ledger = ActionLedger()
    ledger.fold(*ONE_OF_EACH[0])
    before = ledger.checksum
    assert len({before, sealed(ledger.state, 1), sealed(ledger.state, 2)}) == 3
    assert sealed(ledger.state, 0) == before
    assert ledger.checksum == before
    assert ledger.count == 1
