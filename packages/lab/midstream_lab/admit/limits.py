"""Checks a sweep's limits: one grid, the model's length, the room of a cell in the worker's tables,
the cell quota.
"""

from itertools import accumulate

from midstream.api.resolve.edits.steering import Room, room_of
from midstream.schemas.base.errors import MidstreamError, invalid
from midstream.schemas.jobs.models import ModelInfo
from midstream.schemas.settings.settings import Settings

from ..records.sweep_paths import BRANCH_HOOK, StoredPath
from ..records.sweeps import PatchWindow, StoredSweep
from .alignment import CLEAN, CORRUPT

#: Pairs that an error lists.
SHOWN_PAIRS = 8


def check_limits(sweep: StoredSweep, model: ModelInfo, settings: Settings) -> None:
    """Check all limits. Raises a 400 with what exceeds a limit and how to reduce it."""
    _check_columns(sweep)
    _check_window(sweep)
    _check_cells(sweep, settings)
    _check_lengths(sweep, model)
    _check_room(sweep, model)
    _check_capture(sweep, model, settings)


def _check_columns(sweep: StoredSweep) -> None:
    counts = [len(pair.columns) for pair in sweep.pairs]
    if len(set(counts)) > 1:
        shown = ", ".join(
            f"pairs[{index}] {count}" for index, count in enumerate(counts[:SHOWN_PAIRS])
        ) + (", …" if len(counts) > SHOWN_PAIRS else "")
        raise invalid(
            "pairs",
            f"have different numbers of columns, so their grids cannot be averaged: {shown}",
            allowed=(
                "the same number in every pair: positions counted from the end (-1, -2, …), or "
                "spans with the same names"
            ),
        )


def _check_window(sweep: StoredSweep) -> None:
    for name, present in (("layers", len(sweep.layers)), ("positions", sweep.num_columns)):
        if (needed := getattr(sweep.window, name)) > present:
            raise invalid(
                f"window.{name}",
                f"{needed} exceeds the number of {name} in the sweep",
                allowed=f"1 to {present}",
            )


def _check_cells(sweep: StoredSweep, settings: Settings) -> None:
    if sweep.num_cells > settings.sweep_cells:
        factors = (
            (len(sweep.pairs), "pairs"),
            (len(sweep.hooks), "hooks"),
            (len(sweep.layers), "layers"),
            (sweep.num_columns, "columns"),
        )
        shown = " × ".join(f"{count} {name if count > 1 else name[:-1]}" for count, name in factors)
        raise too_many_cells(f"{sweep.num_cells} cells ({shown})", settings.sweep_cells)


def too_many_cells(result: str, limit: int) -> MidstreamError:
    return invalid(
        "pairs",
        f"the sweep has {result}",
        allowed=f"at most {limit} (setting sweep_cells)",
        hint="use fewer layers, hooks or positions, spans instead of single positions, or fewer "
        "pairs in one sweep",
    )


def _check_lengths(sweep: StoredSweep, model: ModelInfo) -> None:
    for index, pair in enumerate(sweep.pairs):
        more = max(len(pair.answer), len(pair.foil), 1)
        for ids, is_base in ((pair.base, True), (pair.source, False)):
            if len(ids) + more > model.max_model_len:
                clean = is_base == sweep.patches_clean
                raise invalid(
                    f"pairs[{index}].{CLEAN if clean else CORRUPT}",
                    (
                        f"has {len(ids)} tokens, followed by {more} more: the model's limit is "
                        f"{model.max_model_len} in total"
                    ),
                )


def room_of_cell(sweep: StoredSweep, num_layers: int) -> Room:
    """Return the room of the largest cell in the steering table: a row for each position, an entry
    for each vector.

    (Cells of an ablation take less. No-op patches, which measure noise, do not.)
    """
    if sweep.path is not None:
        return _room_of_pass(sweep, sweep.path, num_layers)
    item = sweep.window.layers * (
        2 if sweep.mask or any(column.masked for column in sweep.pairs[0].columns) else 1
    )
    widest = 0
    window = sweep.window.positions
    for pair in sweep.pairs:
        # number of places before each column, and in all
        before = [0, *accumulate(len(column.places) for column in pair.columns)]
        widest = max(
            widest,
            *(
                before[min(first + window, len(before) - 1)] - count
                for first, count in enumerate(before)
            ),
        )
    return Room(widest, widest * item)


def _room_of_pass(sweep: StoredSweep, path: StoredPath, num_layers: int) -> Room:
    """Return the room of a path's pass: for each position, the sender's vector and mask and a
    vector for each frozen site, or a vector and mask for each receiver.
    """
    rows = max(len(pair.base) for pair in sweep.pairs)
    top = max((end.layer for end in path.receivers), default=num_layers - 1)
    frozen = max(
        sum(map(len, path.frozen_sites(sender, top).values()))
        for sender in path.senders(sweep.sites)
    )
    return Room(rows, rows * max(2 + frozen, 2 * len(path.receivers)))


def _check_room(sweep: StoredSweep, model: ModelInfo) -> None:
    needed = room_of_cell(sweep, model.num_layers)
    for name, requested, present in zip(Room._fields, needed, room_of(model), strict=True):
        if present and requested > present:
            raise invalid(
                "pairs" if sweep.window == PatchWindow() else "window",
                f"the largest cell needs {requested} {name} of the steering table, but the worker "
                f"has {present} (setting tuning.steering_{name})",
                hint="use a smaller window, or spans of fewer tokens",
            )


def _check_capture(sweep: StoredSweep, model: ModelInfo, settings: Settings) -> None:
    """Check that the rows of one prompt token, with its drafts, fit the capture buffer."""
    hooks = {*sweep.hooks}
    ranked = any(column.ranks is not None for column in sweep.pairs[0].columns)
    of_base = hooks if sweep.ablation == "mean" or ranked else {sweep.hooks[0]}
    if settings.tuning.sweep_entry and "pre_attn" in model.hooks:
        # rows from which passes that begin at the patched layer continue
        of_base = of_base | {"pre_attn"}
    layers = len(sweep.layers)
    if sweep.path is not None:
        of_base = of_base | {*BRANCH_HOOK.values()}
        layers = model.num_layers
    sites = layers * max(len(of_base), 0 if sweep.ablation else len(hooks))
    rows = sites * min(1 + model.speculative_tokens, max(pair.longest for pair in sweep.pairs))
    if not model.step_holds(rows):
        raise invalid(
            "layers",
            f"a prompt produces {rows} rows in one engine step, for one token: more than "
            "the worker's buffer holds (setting "
            "capture_buffer_mib)",
            allowed=f"at most {model.capture_row_limit} rows per step",
            hint="use fewer layers or hooks in one sweep",
        )
