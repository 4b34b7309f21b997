"""Terminal output of the service's status, for 80 columns."""

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ...schemas.jobs.jobs import State
from ...schemas.jobs.models import SHOWN_IDENTITY, WorkerInfo
from ...schemas.service.status import QueueStatus, ServiceStatus
from .jobs import Cells, bare, count, moment, size, text_of

#: Column titles in the table of jobs, by state.
_STATES = {
    state: "begun" if state is State.RUNNING else state.value
    for state in State
    if state not in (State.CANCELLING, State.EXPIRED)
}
#: The most characters of a name in a line, so that numbers fit 80 columns.
_NAME = 22
#: Seconds for which a disagreement of ranks is shown.
DESYNC_SHOWN_S = 24 * 3600.0


def status(now: ServiceStatus, url: str, before: ServiceStatus | None = None) -> RenderableType:
    """Render the service's status. `before`: an earlier status, from which rates per second are
    computed.
    """
    parts: list[RenderableType] = [_head(now, url), _jobs(now, before), _workers(now.workers)]
    if now.queues:
        parts.insert(2, _queues(now.queues))
    if now.last_desync is not None and now.at - now.last_desync.at < DESYNC_SHOWN_S:
        ago = _ago(now.at - now.last_desync.at)
        parts.append(
            Text(
                (
                    f"ranks of {now.last_desync.worker} disagreed {ago} ago: "
                    f"{now.last_desync.detail}"
                ),
                style="yellow",
            )
        )
    return Group(*parts)


def _head(now: ServiceStatus, url: str) -> Text:
    redis = now.redis
    memory = (
        f"{size(redis.used_bytes)} of {size(redis.limit_bytes)} ({redis.share:.0%})"
        if redis.limit_bytes
        else size(redis.used_bytes)
    )
    callbacks = now.callbacks
    late = (
        f", {callbacks.webhooks_overdue_s:.0f} s overdue"
        if callbacks.webhooks_overdue_s >= 1
        else ""
    )
    webhooks = f"{count(callbacks.webhooks_pending, 'webhook')} pending{late}"
    relay = _alive("relay", now.relay.alive, count(now.relay.received, "receipt"))
    lines = (
        f"[bold]midstream {escape(now.version)}[/] at {escape(url)} · {moment(now.at)}",
        f"{count(now.live, 'job')} live, {now.queued} queued, {count(now.held, 'response')} held",
        f"{relay} · redis {memory}, {redis.milliseconds:.1f} ms",
        _alive("callbacks", callbacks.alive, webhooks),
    )
    return Text.from_markup("\n".join(lines))


def _alive(name: str, alive: bool, more: str) -> str:
    return f"{name} [green]alive[/], {more}" if alive else f"{name} [bold red]not seen[/]"


def _table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str | Text]], name_columns: int = 1
) -> Table:
    """Build a table. The first `name_columns` columns contain names, which are folded to fit: the
    end of a worker's name tells it from others. The other columns contain numbers.
    """
    result = bare(f"\n{title}", gap=1)
    result.title_style = "bold"
    for place, column in enumerate(columns):
        if place < name_columns:
            result.add_column(column, overflow="fold", max_width=_NAME)
        else:
            widest = max([len(column), *[len(row[place]) for row in rows]])
            result.add_column(column, justify="right", no_wrap=True, min_width=widest)
    for row in rows:
        result.add_row(*[cell if isinstance(cell, Text) else escape(cell) for cell in row])
    return result


def _jobs(now: ServiceStatus, before: ServiceStatus | None) -> Table:
    rows = []
    for model, counts in now.counts.items():
        rate = "–"
        if before is not None and now.at > before.at:
            ended = counts.get("succeeded", 0) - before.counts.get(model, {}).get("succeeded", 0)
            rate = f"{ended / (now.at - before.at):.1f}"
        rows.append([model, *[str(counts.get(state, 0)) for state in _STATES], rate])
    return _table("jobs so far", ["model", *_STATES.values(), "done/s"], rows)


def _queues(queues: Iterable[QueueStatus]) -> Table:
    rows = [
        [
            queue.model,
            ", ".join(
                f"{tenant} {count}"
                for tenant, count in sorted(queue.waiting.items(), key=lambda item: -item[1])
            ),
            queue.priority,
            str(queue.sent),
            str(sum(queue.waiting.values())),
            _ago(queue.oldest_s) if queue.waiting else "–",
        ]
        for queue in queues
    ]
    columns = ["model", "who waits", "priority", "sent", "waiting", "oldest"]
    return _table("queues", columns, rows, name_columns=2)


def _workers(workers: Sequence[WorkerInfo]) -> RenderableType:
    if not workers:
        return Text("\nno worker is running", style="bold red")
    columns = ["worker", "tp×pp", *_STATS]
    tables: list[RenderableType] = []
    for model in sorted({worker.model for worker in workers}):
        of_model = [worker for worker in workers if worker.model == model]
        identities = ", ".join(
            sorted({worker.identity[:SHOWN_IDENTITY] for worker in of_model if worker.identity})
        )
        title = f"workers of {escape(model)}" + (f", identity {identities}" if identities else "")
        tables.append(_table(title, columns, [_worker(worker) for worker in of_model]))
    return Group(
        *tables,
        *[
            Text(f"{worker.worker}: {worker.detail}", style="red")
            for worker in workers
            if not worker.healthy
        ],
    )


def _worker(worker: WorkerInfo) -> list[str | Text]:
    name = Text(worker.worker, style="green" if worker.healthy else "red")
    place = f"{worker.tp}×{worker.pp}"
    if worker.stats is None:
        return [name, place, *["–"] * len(_STATS)]
    return [name, place, *[text_of(cell, worker.stats) for cell in _STATS.values()]]


#: Column of workers → its cell, of what the worker last told.
_STATS: Cells = {
    "jobs": "{jobs}",
    "run": "{running}",
    "wait": "{waiting}",
    "tok/s in": "{prompt_tokens_s:.0f}",
    "out": "{generated_tokens_s:.0f}",
    "kv": "{kv_cache:.0%}",
    "rows": "{rows_used}/{rows}",
    "outbox": "{outbox}",
}


def _ago(seconds: float) -> str:
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
