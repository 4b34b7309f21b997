"""The commands `status`, `logs` and `down`, for a `midstream up` that runs on this machine."""

import os
import shutil
import signal
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Annotated, Any

import httpx2
import typer

from midstream.client.cli.terminal import AsJson, out, say
from midstream.client.render import jobs
from midstream.client.sdk import discovery
from midstream.schemas.base.errors import MidstreamError, suggestion
from midstream.schemas.base.records import from_json, now, to_json
from midstream.schemas.settings.instance import instance_of
from midstream.schemas.settings.settings import load_settings
from midstream.storage.disk import probe

from .processes import birth, end_leftover, wait_for

DataDir = Annotated[
    Path | None,
    typer.Option(help="Data directory of the `midstream up`; default: from the settings."),
]

#: Exit codes of `status`, like those of service managers: everything runs, a part is down, nothing
#: runs.
ALL_RUN = 0
PART_RUNS = 1
NOTHING_RUNS = 3
#: Folders of a data directory whose sizes `status` shows.
PARTS = ("captures", "redis", "outbox", "logs")
LOOK_S = 0.3


def _folder(data_dir: Path | None) -> Path:
    return discovery.data_dir(load_settings(data_dir=str(data_dir) if data_dir else None))


# --- status


def status(data_dir: DataDir = None, json_: AsJson = False) -> None:
    """Show processes, ports and disk usage of this machine's stack.

    Exit code 0: ready, 1: a part is down, or a job would not run now, 3: not running.
    """
    data = _folder(data_dir)
    stack = discovery.running(data)
    known = stack.processes if stack else discovery.written(data).processes
    alive = {name: pid for name, (pid, born) in known.items() if born and birth(pid) == born}
    trouble = _trouble(stack) if stack else "no stack is running"
    if json_:
        print(to_json(_facts(data, stack, known, alive) | {"trouble": trouble}).decode())
    elif stack is None:
        say(
            f"no stack is running on {data}; set MIDSTREAM_DATA_DIR or give --data-dir for one "
            "elsewhere"
        )
        if alive:
            listing = ", ".join(f"{name} (pid {pid})" for name, pid in alive.items())
            say(f"left over from a killed `midstream up`: {listing}; `midstream down` stops them")
        elif data.is_dir():
            say(_disk_line(data))
    else:
        _print_stack(stack, alive, trouble or f"{stack.url} is ready")
    if stack is None:
        raise typer.Exit(NOTHING_RUNS)
    whole = len(alive) == len(known) and not trouble
    raise typer.Exit(ALL_RUN if whole else PART_RUNS)


def _facts(
    data: Path, stack: discovery.RunningStack | None, known: Iterable[str], alive: dict[str, int]
) -> dict[str, object]:
    usage = shutil.disk_usage(data if data.is_dir() else Path("/"))
    return {
        "running": stack is not None,
        "data_dir": str(data),
        "pid": stack.pid if stack else None,
        "url": stack.url if stack else "",
        "model": stack.model if stack else "",
        "version": stack.version if stack else "",
        "started": stack.started if stack else None,
        "processes": {
            name: {
                "pid": alive.get(name),
                "ports": discovery.ports_of(alive[name]) if name in alive else [],
            }
            for name in known
        },
        "disk": {"bytes": _sizes(data), "free_bytes": usage.free, "total_bytes": usage.total},
    }


def _print_stack(stack: discovery.RunningStack, alive: dict[str, int], answer: str) -> None:
    minutes, seconds = divmod(int(now() - stack.started), 60)
    time_up = f"{minutes} min {seconds} s"
    if minutes >= 60:
        time_up = f"{minutes // 60} h {minutes % 60} min"
    say(f"midstream {stack.version}, up for {time_up}: {answer}")
    say(f"model {stack.model}\ndata  {stack.data}")
    shown = jobs.table("Processes", "process", "state", "pid", "ports")
    rows = {"up": stack.pid, **{name: alive.get(name) for name in stack.processes}}
    for name, pid in rows.items():
        shown.add_row(
            name,
            "[green]runs[/]" if pid else "[red]ended[/]",
            str(pid or ""),
            " ".join(map(str, discovery.ports_of(pid))) if pid else "",
        )
    out.print(shown)
    say(_disk_line(stack.data))


def _trouble(stack: discovery.RunningStack) -> str:
    """Return why no job would run now; empty if one would."""
    if not stack.url:
        return "starting"
    try:
        answer = httpx2.get(f"{stack.url}/readyz", timeout=discovery.ASK_S)
    except httpx2.HTTPError as error:
        return f"no answer at {stack.url} ({error or type(error).__name__})"
    if answer.status_code == httpx2.codes.OK:
        return ""
    is_json = "json" in answer.headers.get("content-type", "")
    said = from_json(answer.content, dict[str, Any]) if is_json else {}
    missing = "; ".join(said.get("missing", ())) or f"it answers {answer.status_code}"
    return f"{stack.url} is not ready: {probe(stack.data) or missing}"


def _sizes(data: Path) -> dict[str, int]:
    """Return the bytes on disk of each folder in `PARTS`; `other`: the rest."""
    sizes = dict.fromkeys((*PARTS, "other"), 0)
    for folder, _, files in os.walk(data):
        part = Path(folder).relative_to(data).parts[:1]
        name = part[0] if part and part[0] in PARTS else "other"
        for file in files:
            with suppress(OSError):  # removed since it was listed
                sizes[name] += (Path(folder) / file).lstat().st_blocks * 512
    return sizes


def _disk_line(data: Path) -> str:
    usage = shutil.disk_usage(data)
    parts = ", ".join(f"{name} {jobs.size(count)}" for name, count in _sizes(data).items() if count)
    return f"disk: {parts or 'empty'}; {jobs.size(usage.free)} of {jobs.size(usage.total)} free"


# --- logs


def logs(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PROCESS]...", help="Such as worker or api; default: all."),
    ] = None,
    lines: Annotated[
        int, typer.Option("-n", "--lines", help="Number of lines from the end of each log.", min=0)
    ] = 20,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Keep printing new lines until Ctrl-C.")
    ] = False,
    data_dir: DataDir = None,
) -> None:
    """Show the logs of the stack's processes on this machine, even after it has stopped."""
    folder = _folder(data_dir) / "logs"
    files = {path.stem: path for path in sorted(folder.glob("*.log"))}
    if not files:
        raise MidstreamError("not_found", f"no logs in {folder}")
    for name in names or ():
        if name not in files:
            raise MidstreamError(
                "not_found",
                f"no log of {name!r}",
                allowed=", ".join(files),
                hint=suggestion(name, files),
            )
    chosen = {name: files[name] for name in (names or files)}
    wide = max(map(len, chosen)) if len(chosen) > 1 else 0
    opened: dict[str, IO[str]] = {}
    try:
        for name, path in chosen.items():
            opened[name] = path.open(errors="replace")
            _print_lines(name, wide, deque(opened[name], maxlen=lines))
        while follow:
            time.sleep(LOOK_S)
            for name, path in chosen.items():
                _print_lines(name, wide, opened[name])
                if _is_rotated(path, opened[name]):
                    opened[name].close()
                    opened[name] = path.open(errors="replace")
    except KeyboardInterrupt:
        return
    finally:
        for handle in opened.values():
            handle.close()


def _is_rotated(path: Path, opened: IO[str]) -> bool:
    """Return whether a log begins anew: in another file, or cut by the process that rotates it."""
    try:
        now_there = path.stat()
    except FileNotFoundError:
        return False
    former = os.fstat(opened.fileno())
    return now_there.st_ino != former.st_ino or now_there.st_size < opened.tell()


def _print_lines(name: str, wide: int, lines: Iterable[str]) -> None:
    for line in lines:
        print(f"{name:<{wide}} | {line.rstrip()}" if wide else line.rstrip(), flush=True)


# --- down


def down(
    now_: Annotated[
        bool,
        typer.Option(
            "--now",
            help="Kill the processes instead of waiting for running jobs, which restart later.",
        ),
    ] = False,
    timeout: Annotated[
        float, typer.Option(help="Seconds to wait for the stack to stop.", min=0)
    ] = 120.0,
    data_dir: DataDir = None,
) -> None:
    """Stop the stack running on this machine, as Ctrl-C in its terminal does.

    Does nothing if no stack is running.
    """
    data = _folder(data_dir)
    stack = discovery.running(data)
    if stack is None:
        names = [
            name
            for name, (pid, born) in discovery.written(data).processes.items()
            if end_leftover(pid, born)
        ]
        more = f"; stopped leftovers of a killed `midstream up`: {', '.join(names)}"
        say(f"no stack is running on {data}{more if names else ''}")
        return
    _signal(stack)
    if now_:
        time.sleep(LOOK_S)  # the first signal stops the stack in order; the second kills it
        _signal(stack)
    if not wait_for(lambda: instance_of(stack.pid) != stack.instance, timeout):
        raise MidstreamError(
            "conflict",
            f"the stack on {data} (pid {stack.pid}) is still stopping after {timeout:.0f} s",
            hint="`midstream down --now` kills it, and `midstream logs` shows its logs",
        )
    say(f"stopped the stack on {data}")


def _signal(stack: discovery.RunningStack) -> None:
    """Send SIGTERM to the stack's process, but not to another process that has reused its pid."""
    with suppress(ProcessLookupError), open(os.pidfd_open(stack.pid), "rb", 0) as handle:
        if instance_of(stack.pid) == stack.instance:
            signal.pidfd_send_signal(handle.fileno(), signal.SIGTERM)
