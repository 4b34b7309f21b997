"""Terminal output of named modules, global steering and the ranks' reports."""

from collections.abc import Sequence

from rich import box
from rich.markup import escape
from rich.table import Table

from ...schemas.base.records import by_key, to_json
from ...schemas.prompts.selectors import as_ranges
from ...schemas.requests.steering import (
    Dynamic,
    EntryView,
    GlobalView,
    RankAgreement,
    WorkerSteering,
)
from .jobs import TABLE_ROWS, Cells, FittingTable, count, lines, text_of

#: Characters shown of a digest, enough to distinguish digests.
DIGEST = 12
_STATES = {"serving": "green", "resyncing": "yellow", "quarantined": "red"}


def what(entries: Sequence[EntryView]) -> str:
    """Summarise entries by op and hook: `add at post_block 10-15; clamp at mlp_out 3`."""
    sites = by_key(((entry.op, entry.hook), layer) for entry in entries for layer in entry.layers)
    return escape(
        "; ".join(f"{op} at {hook} {as_ranges(layers)}" for (op, hook), layers in sites.items())
    )


def entries(views: Sequence[EntryView]) -> Table:
    """Return a table of the first `TABLE_ROWS` entries."""
    return lines("Entries", _ENTRY, views, most=TABLE_ROWS)


def _op(view: EntryView) -> str:
    rank = f" of rank {view.rank}" if view.rank else ""
    return f"{view.op}{rank}{' norm_match' if view.norm_match else ''}"


def _positions(view: EntryView) -> str:
    positions = (
        view.positions if isinstance(view.positions, str) else to_json(view.positions).decode()
    )
    if view.trigger is not None:
        positions += f", trigger {to_json(view.trigger).decode()}"
    return escape(positions)


#: Column of entries → its cell.
_ENTRY: Cells = {
    "op": _op,
    "hook": "{hook}",
    "layers": "{layers:ranges}",
    "positions": _positions,
    "scale": "{scale:g}",
    "numbers": lambda view: ", ".join(f"{number:g}" for number in view.numbers),
    "tensors": lambda view: ", ".join(tensor[:DIGEST] for tensor in view.tensors),
}


def global_line(view: GlobalView) -> str:
    """Return a line about global steering."""
    content = f"{what(view.entries)}, digest {view.digest[:DIGEST]}" if view.entries else "nothing"
    return f"global steering of {escape(view.model)}, version {view.version}: {content}"


def worker_line(worker: WorkerSteering) -> str:
    state = f"[{_STATES[worker.state]}]{worker.state}[/]" + (
        f" ({escape(worker.detail)})" if worker.detail else ""
    )
    desyncs = (
        f", {count(worker.desyncs, 'desync')} found, {worker.resyncs} repaired"
        if worker.desyncs
        else ""
    )
    waits = f"{count(worker.waiting, 'request')} wait{'s' if worker.waiting == 1 else ''} for rows"
    return f"{escape(worker.worker)} of {escape(worker.model)}: {state}, {waits}{desyncs}"


def ranks(worker: WorkerSteering, agreement: RankAgreement) -> Table:
    """Return a table of the status of one worker's ranks; ranks of an inconsistent stage are red.

    `queues`: unsent receipts, and bytes of rows that wait for the disk.
    """
    inconsistent = {
        stage.pp
        for stage in agreement.stages
        if stage.worker == worker.worker and not stage.consistent
    }
    # no padding, so that a rank fits on one line of 80 columns
    shown = FittingTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    for column in _RANK:
        shown.add_column(column, justify="right", no_wrap=True)
    for rank in worker.ranks:
        cells = [text_of(cell, rank) for cell in _RANK.values()]
        shown.add_row(*cells, style="red" if rank.pp in inconsistent else None)
    return shown


#: Column of ranks → its cell.
_RANK: Cells = {
    "rank": "{rank}",
    "pp": "{pp}",
    "checksum": "{checksum}",
    "actions": "{actions}",
    "rows": "{rows_used}/{rows}",
    "entries": "{entries_used}/{entries}",
    "requests": "{requests}",
    "queues": "{outbox}, {backlog:size}",
}


def agreement_line(dynamic: Dynamic) -> str:
    """Return a line on whether all ranks of all workers agree."""
    agreement = dynamic.determinism
    if not agreement.consistent:
        return (
            "determinism: [red]not consistent[/]: "
            f"{escape(agreement.detail or 'a rank differs from its peers')}"
        )
    stages = agreement.stages
    many = sum(len(stage.checksums) for stage in stages)
    extent = (
        f"{count(many, 'rank')} in {count(len(stages), 'stage')} of "
        f"{count(len(dynamic.workers), 'worker')}"
    )
    if len(stages) != 1:
        return (
            f"determinism: [green]consistent[/], {extent}, all checksums and action counts "
            "agree within each stage"
        )
    (stage,) = stages
    checksum = next(iter(stage.checksums.values()))
    actions = next(iter(stage.actions.values()))
    return (
        f"determinism: [green]consistent[/], {extent}, checksum {checksum} over "
        f"{count(actions, 'action')}"
    )
