"""The action checksum is the same everywhere, and no difference between two ranks escapes it."""

import pytest

from midstream.workers.runner.actions import ActionLedger, splitmix64


def fold(*actions: tuple) -> str:
    ledger = ActionLedger()
    for action in actions:
        ledger.fold(*action)
    return ledger.checksum


def test_splitmix64_gives_the_published_sequence() -> None:
    """First outputs for seed 1234567, from the reference C code (prng.di.unimi.it/splitmix64.c)."""
    gamma, state, outputs = 0x9E3779B97F4A7C15, 1234567, []
    for _ in range(3):
        outputs.append(splitmix64(state))
        state = (state + gamma) % (1 << 64)
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_checksums_are_pinned_over_hosts_and_versions() -> None:
    assert fold() == "0000000000000000"
    assert fold((1, "vector_put", "a" * 64)) == "26af5bfb4ab3bac3"
    assert fold((1, "row_admit", "k"), (1, "steer", "job", 0, 1, "d"), (9, "row_release", "k")) == "9b8aff4304bb35d7"


@pytest.mark.parametrize(
    "other",
    [
        [(1, "put", "b"), (2, "drop", "a")],  # content
        [(2, "drop", "a"), (1, "put", "a")],  # order
        [(1, "put", "a"), (3, "drop", "a")],  # step
        [(1, "put", "a")],  # one action less
        [(1, "put", "a"), (2, "drop", "a"), (2, "drop", "a")],  # one more
        [(1, "putd", "a"), (2, "rop", "a")],  # the same characters, cut elsewhere
    ],
)
def test_any_difference_changes_the_checksum(other) -> None:
    assert fold((1, "put", "a"), (2, "drop", "a")) != fold(*other)


def test_two_ranks_that_swap_actions_between_them_do_not_collide() -> None:
    """Equal counts, equal multisets of actions: only the order tells."""
    actions = [(step, "row_admit", f"key{step}") for step in range(50)]
    assert fold(*actions) != fold(*actions[:20], actions[21], actions[20], *actions[22:])
