"""The end of a step's plan: steps of decoding repeat it at later positions, until a request comes
or goes or one of its selectors begins or ends.
"""

import sys
from collections.abc import Sequence

from ....schemas.prompts.selectors import PositionSelector, end_position, lowest_position, select
from ..base.engine_step import RequestRows
from .planner import Tracked


def end_of_plan(bank: str, tracked: Tracked, rows: RequestRows) -> int:
    """Return the position below which the plan of a request's rows in `bank` is right for later
    rows, too.
    """
    first, stop = rows.first_position, rows.first_position + rows.num_rows
    prompt = tracked.spec.prompt_tokens
    chosen = [
        (row.positions, select(row.positions, first, stop, prompt))
        for _, row in tracked.rows
        if row.bank == bank
    ]
    chosen += [
        (item.capture.positions, item.capture.select(first, stop, prompt))
        for item in tracked.recordings.values()
        if item.bank == bank and not tracked.reported
    ]
    return min([_end_of(*item, rows, prompt) for item in chosen], default=sys.maxsize)


def _end_of(
    selector: PositionSelector, chosen: Sequence[int], rows: RequestRows, prompt_tokens: int
) -> int:
    """Return the position up to which the selector has all positions, if `chosen`, those of `rows`,
    are all, or none, if they are none; 0 if that is not known.
    """
    if not selector:
        return sys.maxsize
    if not chosen and rows.first_position >= end_position(selector, prompt_tokens):
        return sys.maxsize
    if not chosen:
        return lowest_position(selector, prompt_tokens)
    whole = isinstance(chosen, range) and len(chosen) == rows.num_rows
    return end_position(selector, prompt_tokens) if whole else 0
