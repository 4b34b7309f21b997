"""Relative sizes of a request's edits: what counts, how exactly, and which edit was too large."""

import math

import numpy as np
import pytest

from midstream.workers.runner.hooks.sites import Site
from midstream.workers.runner.rows.edit_sizes import STEPS, SizeCount

SITES = [Site("post_block", layer, "pair") for layer in range(4)]
NAN = math.nan


def step(*rows: list[float]) -> np.ndarray:
    return np.array(rows, dtype=np.float32)


def test_the_median_is_within_its_bound_and_the_largest_exact() -> None:
    draws = np.random.default_rng(1)
    for scale in (1e-3, 0.1, 3.0, 200.0):
        sizes, values = (
            SizeCount(SITES),
            (draws.random(1001) * scale).astype(np.float32) + scale / 100,
        )
        for number, value in enumerate(values):
            sizes.add(number, 2, step([value]))
        sizes.close(len(values))
        (found,) = sizes.report(0)
        assert (found.hook, found.layer, found.rows) == ("post_block", 2, 1001)
        assert found.largest == values.max()
        wanted = np.quantile(values, 0.5, method="inverted_cdf")
        if 2**-12 < wanted < 2**8:
            assert math.isclose(found.median, wanted, rel_tol=0.015), (found, wanted)


def test_sizes_beyond_the_bins_are_reported_as_zero_and_as_the_largest() -> None:
    for value, median in ((0.0, 0.0), (2e-4, 0.0), (1000.0, 1000.0)):
        sizes = SizeCount(SITES)
        sizes.add(0, 0, step([value]))
        sizes.close(1)
        assert [sizes.report(0)[0].median] == [pytest.approx(median)]


@pytest.mark.parametrize("wait", [0, STEPS])
def test_rejected_drafts_and_positions_computed_again_do_not_count(wait: int) -> None:
    """`wait`: with so many steps more, which are counted before the request ends."""
    sizes = SizeCount(SITES)
    sizes.add(0, 1, step([1, 2, 3], [NAN, 5, NAN]))
    sizes.add(3, 1, step([4, 90, 91]))  # two drafts are rejected
    sizes.add(4, 1, step([5, 92]))  # the next step never begins: preempted
    sizes.add(0, 1, step([93, 93, 93, 93, 6, 7]))
    for number in range(wait):
        sizes.add(6 + number, 1, step([0.5]))
    sizes.close(6 + wait)
    assert not sizes.too_large
    first, second = sizes.report(0)
    # position 4 counts as it was computed last, as its first computation was dropped
    assert (first.layer, first.rows, first.largest) == (1, 6 + wait, 7.0)
    assert (second.layer, second.rows, second.largest) == (2, 1, 5.0)


def test_rows_after_the_end_do_not_count() -> None:
    sizes = SizeCount(SITES)
    sizes.add(0, 0, step([1, 2, 9]))
    sizes.close(2)
    assert sizes.report(0)[0].largest == 2.0


def test_the_first_edit_beyond_its_limit_is_found_by_position_once_it_counts() -> None:
    sizes = SizeCount(SITES)
    sizes.add(0, 1, step([1, -3, -4], [1, 1, -2], [NAN, -8, 1]))
    assert not sizes.too_large, "it may be a draft"
    sizes.add(3, 1, step([1], [1], [1]))
    assert "post_block of layer 1, position 1 is 3 times" in sizes.too_large
    rejected = SizeCount(SITES)
    rejected.add(0, 0, step([1, -3]))
    rejected.add(1, 0, step([1]))
    rejected.close(2)
    assert not rejected.too_large
    assert rejected.report(0)[0].largest == 1.0


def test_equal_sizes_have_equal_checksums_however_they_are_computed() -> None:
    whole, parts, other = SizeCount(SITES), SizeCount(SITES), SizeCount(SITES)
    whole.add(0, 0, step([1, 2, 3]))
    for number in range(3):
        parts.add(number, 0, step([number + 1.0]))
        other.add(number, 0, step([number + 1.5]))
    for sizes in (whole, parts, other):
        sizes.close(3)
    assert whole.checksum(0) == parts.checksum(0) != other.checksum(0)
