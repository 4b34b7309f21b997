"""Runs the properties of the site ops on the Triton kernels under Triton's interpreter.

A program that prints JSON.

The object is sentence → fault or null. It is a process of its own, since Triton decides when a
kernel is defined whether it will be interpreted.
"""

import json
import math
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
from site_groups import check_groups, check_groups_against
from site_kit import DTYPES, EXACT, Case, Op, begin, new_seed, random_case, run, same_bits
from site_plans import SitePlan
from site_properties import PROPERTIES
from site_rounding import round_as_gpus_do
from triton.runtime import interpreter

from midstream.kernels import reference, triton_rows, triton_site
from midstream.kernels.ops import implementations
from midstream.kernels.plan import Does

REFERENCE = implementations(reference.launch)


def a_random_step_without_sums_gives_the_references_bits(pair_site: Op, single_site: Op) -> None:
    for dtype in DTYPES:
        for pair in (True, False):
            for _ in range(4):
                case = random_case(
                    new_seed(), dtype=dtype, width=37, tokens=11, pair=pair, families=EXACT
                )
                found = run(case, pair_site, single_site)
                expected = run(case, *REFERENCE)
                assert same_bits(found.stream, expected.stream), case.name
                assert same_bits(found.ring, expected.ring), case.name
                assert found.hidden is None or same_bits(found.hidden, expected.hidden), case.name


def finite_rows_are_reduced_only_for_their_sizes(pair_site: Op, single_site: Op) -> None:
    """A reduction waits for all threads of the row. An addition needs the norms of the row and of
    the change, an edit without effect that of the row, and a replacement a look whether it changed
    anything; a scaled edit is measured again. Values are looked at only where a norm is not finite:
    the row's and the change's, of an addition.
    """
    add = {"add": Does(torch.ones(1, 5))}
    limited = {"add": Does(torch.ones(1, 5), limit=0.5)}
    replace = {"replace": Does(torch.full((1, 5), 2.0), (1.0,))}
    idle = {"replace": Does(torch.ones(1, 5), (0.0,))}
    for configuration, value, needed in (
        (add, 1.0, 2),
        (replace, 1.0, 3),
        (idle, 1.0, 1),
        (limited, 1.0, 3),
        (add, 1e30, 4),
        (add, math.inf, 4),
    ):
        for pair in (True, False):
            case = Case(
                SitePlan(5, [configuration], {0: [1]}),
                torch.zeros(1, 5) if pair else None,
                torch.full((1, 5), value),
                2,
                1,
            )
            with _counted_reductions() as done:
                run(case, pair_site, single_site)
            assert len(done) == needed, (configuration, value, len(done))


@contextmanager
def _counted_reductions() -> Iterator[list[object]]:
    """An item for each reduction of the interpreted kernels within the block."""
    done: list[object] = []
    reduced = interpreter.ReduceOps.apply_impl

    def counted(self: Any, given: Any) -> Any:
        done.append(self.combine_fn)
        return reduced(self, given)

    interpreter.ReduceOps.apply_impl = counted
    try:
        yield done
    finally:
        interpreter.ReduceOps.apply_impl = reduced


def few_programs_walk_over_many_tokens(pair_site: Op, single_site: Op) -> None:
    plan = SitePlan(
        5,
        [{"add": Does(torch.ones(1, 5))}],
        {token: [1] for token in range(0, 23, 2)},
        before=range(23),
        after=range(23),
        after_row=23,
    )
    case = Case(plan, None, torch.zeros(23, 5), 46, 23)
    most = triton_site.MAX_PROGRAMS
    triton_site.MAX_PROGRAMS = 4
    try:
        found = run(case, pair_site, single_site)
    finally:
        triton_site.MAX_PROGRAMS = most
    assert found.stream[:, 0].tolist() == [1.0, 0.0] * 11 + [1.0]
    assert not found.ring[:23].any()
    assert same_bits(found.ring[23:], found.stream)


def padding_beyond_the_buffers_is_left_alone(pair_site: Op, single_site: Op) -> None:
    plan = SitePlan(5, [{"add": Does(torch.ones(1, 5))}], {1: [1]}, before=[0, 1])
    found = run(Case(plan, torch.zeros(9, 5), torch.zeros(9, 5), 2, 2), pair_site, single_site)
    assert found.stream[:, 0].tolist() == [0.0, 1.0] + [0.0] * 7


class _OneRowFewer:
    """The kernel, launched for one token fewer than there are."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        place = self._kernel.arg_names.index("tokens")
        return lambda *given, **options: self._kernel[grid](
            *given[:place], given[place] - 1, *given[place + 1 :], **options
        )


def a_kernel_that_leaves_a_row_out_counts_one_fewer(pair_site: Op, single_site: Op) -> None:
    """Edited rows, and captured ones of both ports; over several programs, which add up what each
    did.
    """
    for pair in (True, False):
        plan = SitePlan(
            hidden_size=5,
            configurations=[{"add": Does(torch.ones(1, 5))}],
            edits={token: [1] for token in range(9)},
            before=range(9),
            after=range(9),
            before_row=0,
            after_row=9,
            site=3,
        )
        case = Case(plan, torch.zeros(9, 5) if pair else None, torch.zeros(9, 5), 18, 9)
        assert run(case, pair_site, single_site).counts.tolist() == [[0] * 3, [0] * 3, [9] * 3]
        kernel = triton_site._sites
        triton_site._sites = _OneRowFewer(kernel)
        try:
            assert run(case, pair_site, single_site).counts.tolist() == [[0] * 3, [0] * 3, [8] * 3]
        finally:
            triton_site._sites = kernel


def sites_that_share_a_launch_give_the_bits_of_one_launch_each(
    pair_site: Op, single_site: Op
) -> None:
    check_groups(pair_site, single_site, rounds=2, widths=(5, 37), tokens=5)
    check_groups_against(pair_site, single_site, REFERENCE, rounds=2, width=37)


def no_tokens_are_no_launch(pair_site: Op, single_site: Op) -> None:
    case = Case(SitePlan(5), torch.zeros(0, 5), torch.zeros(0, 5), 2, 2)
    assert run(case, pair_site, single_site).ring.isnan().all()


def tensors_with_gaps_are_refused(pair_site: Op, single_site: Op) -> None:
    case = Case(SitePlan(5, before=[0]), None, torch.zeros(4, 5), 4, 4)
    wide = torch.zeros(4, 10)
    with pytest.raises(ValueError, match="not contiguous"):
        single_site(wide[:, :5], torch.zeros(4, 5), *case.planned)


def copied_rows_are_in_their_places(pair_site: Op, single_site: Op) -> None:
    for dtype in DTYPES:
        for width in (1, 37, 5000):
            ring = torch.randn(50, width).to(dtype)
            memory = torch.zeros(60, width, dtype=dtype)
            wanted = memory.clone()
            rows = torch.randperm(50)[:20]
            places = torch.randperm(60)[:20]
            wanted[places] = ring[rows]
            triton_rows.scatter(memory, ring, rows, places)
            assert same_bits(memory, wanted), (dtype, width)


SENTENCES = PROPERTIES | {
    check.__name__: check
    for check in (
        a_random_step_without_sums_gives_the_references_bits,
        finite_rows_are_reduced_only_for_their_sizes,
        few_programs_walk_over_many_tokens,
        padding_beyond_the_buffers_is_left_alone,
        a_kernel_that_leaves_a_row_out_counts_one_fewer,
        sites_that_share_a_launch_give_the_bits_of_one_launch_each,
        no_tokens_are_no_launch,
        tensors_with_gaps_are_refused,
        copied_rows_are_in_their_places,
    )
}


def main(sentences: Sequence[str]) -> None:
    torch.set_num_threads(1)
    round_as_gpus_do()
    faults: dict[str, str | None] = {}
    for sentence in sentences:
        begin(sentence)
        try:
            SENTENCES[sentence](*implementations(triton_site.launch))
            faults[sentence] = None
        except Exception:
            faults[sentence] = traceback.format_exc()
    json.dump(faults, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
