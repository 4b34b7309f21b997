"""Why a step takes longer than stock vLLM's: constants of the machine, then one engine of stock and
one of ours in turns, with each part of a step, the device and each switch apart.

The stage has parts, each with a share of its time and a result that is left when it is over; one
that takes longer is cut, and says so. What a run has finished, the next one from the same sources
does not repeat. With `--device cpu` the engines run on the timed device (`timed_device.py`), and
what needs a GPU is left out.
"""

import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import causes
import constants
import kit
from stepped_engine import KINDS, PROFILED, Child, Setup, Work

#: An engine that is not ready, or does not answer, so long after the time of its part is killed.
START_S, PATIENCE_S = 90.0, 20.0
#: Samples of py-spy in a second, and rows of a table of names.
SAMPLES, NAMES = 250, 8
#: Looks at captured rows that are shown of a run.
LOOKS = 8
ROUNDS, SWITCHED_ROUNDS, FEW = 4, 2, 2
#: Share of the memory that is free for files which captured rows may take.
SPARE = 0.75


@dataclass
class Found:
    """What a part of the stage has found until now."""

    figures: dict[str, dict[str, float]] = field(default_factory=dict)
    tables: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Why:
    """The stage: its time, its engines, and what its parts have found."""

    def __init__(self, asked: kit.Options) -> None:
        self.asked, self.device = asked, "cuda" if asked.gpu else "timed"
        self.requests, self.many = (8, 16) if asked.tiny else (64, 256)
        self.generated, self.prompt = (32, 16) if asked.tiny else (128, 32)
        self.until = time.monotonic() + asked.left
        self.short = ""  # what the part that runs had no time for
        self.inject: dict[str, float] = {}  # into parts of our engine, to try what is named
        self._engines: dict[str, Child] = {}  # engine and executor → process
        self.wanted: dict[str, str] = {}  # engine → of those
        self._key = kit.source_hash(device=asked.device, tiny=asked.tiny)
        self._store = (asked.json or asked.out / "why").with_suffix(".parts")
        self.done: dict[str, dict[str, Any]] = {}
        self.cut: dict[str, dict[str, Any]] = {}  # what parts had found that did not end
        with contextlib.suppress(OSError, ValueError):
            kept = json.loads(self._store.read_text())
            self.done = kept["done"] if kept["key"] == self._key else {}
        self.huge = constants.huge_folder(asked.out / "huge")
        self.memory = kit.memory_folder(asked.out)

    # --- Time and results

    @property
    def left(self) -> float:
        """Seconds until the part that runs has to end."""
        return self.until - time.monotonic()

    def so_far(self, name: str, found: Found) -> None:
        kit.so_far(self.asked, self._result({name: asdict(found)}))

    def keep(self, name: str, found: Found) -> None:
        """The part is over, and is not run again."""
        self.done[name] = asdict(found)
        kit.leave(self._store, json.dumps({"key": self._key, "done": self.done}))
        self.so_far(name, found)

    def finish(self, wrong: str) -> None:
        if not wrong:
            self._store.unlink(missing_ok=True)
        kit.finish(self.asked, self._result({}) | ({"wrong": wrong} if wrong else {}))

    def _result(self, more: dict[str, dict[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {"figures": {}, "tables": [], "notes": []}
        for found in (self.cut | self.done | more).values():
            result["figures"] |= found["figures"]
            result["tables"] += found["tables"]
            result["notes"] += found["notes"]
        return result

    # --- Engines

    def start(self, executor: str = "uni") -> dict[str, float]:
        """Have an engine of stock and one of ours, of this executor; others end. Return the seconds
        in which each was ready.

        The timed device is in one process: with another executor, a CPU computes. The time until
        they are ready is not the running part's.
        """
        began = time.monotonic()
        tags = {"memory": self.memory / "small", "disk": self.asked.out / "disk"}
        tags |= {"huge": self.huge} if self.huge else {}
        self.wanted = {"stock": "stock-uni", "ours": f"ours-{executor}"}
        device = self.device
        if device == "timed" and executor != "uni":
            device, self.wanted["stock"] = "cpu", f"stock-{executor}"
        for name, child in list(self._engines.items()):
            if name not in self.wanted.values() or child.over:
                self._engines.pop(name).close()
        for name in self.wanted.values():
            if name not in self._engines:
                engine, _, of_engine = name.partition("-")
                self._engines[name] = Child(
                    Setup(
                        engine,
                        device,
                        of_engine,
                        self.many,
                        folder=str(self.asked.out / name),
                        tags={tag: str(folder / name) for tag, folder in tags.items()},
                    )
                )
        ready = {
            name: float(child.ready(max(0.0, self.left) + START_S).facts["ready_s"])
            for name, child in self._engines.items()
        }
        self.until += min(time.monotonic() - began, max(0.0, self.asked.left - self.left))
        return ready

    def engine(self, kind: str) -> Child:
        return self._engines[self.wanted["stock" if kind == "stock" else "ours"]]

    def facts(self) -> list[str]:
        return [f"{name}: {child.facts}" for name, child in self._engines.items()]

    def close(self, *, kill: bool = False) -> None:
        for child in self._engines.values():
            if kill:
                child.kill()
            child.close()
        self._engines.clear()

    def end(self) -> None:
        """End the engines, and delete what they wrote."""
        self.close()
        for folder in (self.memory, self.asked.out / "disk"):
            shutil.rmtree(folder, ignore_errors=True)

    def work(self, kind: str, **more: Any) -> Work:
        inject = self.inject if kind != "stock" else {}
        plain = Work(kind, self.requests, self.prompt, self.generated, inject=inject)
        return replace(plain, **more)

    def run(self, work: Work) -> dict[str, Any]:
        return self.engine(work.kind).run(work, max(0.0, self.left) + PATIENCE_S)

    def rounds(
        self, works: Mapping[Any, Work], count: int, after: Callable[[dict[Any, Any]], None]
    ) -> dict[Any, list[dict[str, Any]]]:
        """Each work once in a round, in an order that rotates, until there are so many rounds or
        the time is over. `after` is called with what there is after each whole round.
        """
        runs: dict[Any, list[dict[str, Any]]] = {name: [] for name in works}
        names, took = list(works), 0.0
        for number in range(count):
            if number and self.left < took:
                self.short = f"{number} of {count} rounds, for want of time"
                break
            began = time.monotonic()
            for name in names[number % len(names) :] + names[: number % len(names)]:
                runs[name].append(self.run(works[name]))
            took = time.monotonic() - began
            after(runs)
        return runs


# --- Without an engine


def measure_constants(why: Why, found: Found) -> None:
    import torch

    torch.set_num_threads(1)
    gpu, tiny = why.asked.gpu, why.asked.tiny
    rows: list[constants.Row] = []
    memory = {"memory, 4K pages": why.memory / "rate", "memory, huge pages": why.huge}
    folders: dict[str, Path | None] = {**memory, "the disk's folder": why.asked.out / "rate"}
    for measure in (
        lambda: constants.interpreter(gpu=gpu, tiny=tiny),
        lambda: constants.convoy(tiny=tiny),
        lambda: constants.copies(gpu=gpu, tiny=tiny),
        lambda: constants.pages(gpu=gpu, tiny=tiny),
        lambda: constants.files(folders, tiny=tiny, left=lambda: why.left),
    ):
        rows += measure()
        found.tables = [constants.table("Constants of the machine", rows)]
        why.so_far("constants", found)


def measure_sites(why: Why, found: Found) -> None:
    import torch

    rows = constants.sites(gpu=why.asked.gpu, tiny=why.asked.tiny)
    what = "in a graph" if why.asked.gpu else "without a graph: it needs a GPU"
    if why.asked.gpu:  # the engines need it
        torch.cuda.empty_cache()
    found.tables = [constants.table(f"Site launches between matrix products, {what}", rows)]


# --- The engines


def start_engines(why: Why, found: Found) -> None:
    found.notes = [f"ready in {seconds:.0f} s: {name}" for name, seconds in why.start().items()]
    found.notes += why.facts()


def measure_rounds(why: Why, found: Found) -> None:
    why.start()
    works = {kind: why.work(kind) for kind in KINDS}
    for work in works.values():  # graphs, vectors, pages: all is there when the time counts
        why.run(work)

    def after(runs: dict[str, Any]) -> None:
        found.figures = ratios(runs)
        found.tables = [steps_table(runs), *parts_tables(runs), causes_table(runs)]
        why.so_far("rounds", found)

    runs = why.rounds(works, ROUNDS, after)
    found.notes = [f"{len(runs['stock'])} rounds of {why.requests} requests"]
    found.notes += named(causes.attribute(runs))


def measure_switches(why: Why, found: Found) -> None:
    why.start()
    generated = why.generated if why.asked.tiny else why.generated // 2
    works = {
        (kind, switch): why.work(kind, switch=switch, generated=generated)
        for kind in ("one", "steer")
        for switch in ("", *causes.SWITCHES)
    }
    works["stock", ""] = why.work("stock", generated=generated)

    def after(runs: dict[tuple[str, str], Any]) -> None:
        plain = {kind: of_kind for (kind, switch), of_kind in runs.items() if not switch}
        cause = causes.attribute(plain, causes.effects(runs))
        found.tables = [switches_table(cause, causes.effects(runs, "busy"))]
        why.so_far("switches", found)

    why.rounds(works, SWITCHED_ROUNDS, after)
    found.notes = ["without the copies, captured rows are not those of the model"]


def sample_gil(why: Why, found: Found) -> None:
    """Which thread holds the interpreter, sampled by py-spy."""
    here = Path(sys.executable).with_name("py-spy")
    tool = shutil.which("py-spy") or (str(here) if here.exists() else "")
    if not tool:
        found.notes = ["samples of the interpreter lock: py-spy is not there"]
        return
    why.start()
    kinds = ("idle", "one", "both")
    seconds = max(1.0, why.left / len(kinds) - 2)
    rows = []
    for kind in kinds:
        path = why.asked.out / f"gil-{kind}.txt"
        command = [tool, "record", "--gil", "--threads", "--format", "raw", "-o", str(path)]
        command += ["-r", str(SAMPLES), "-d", f"{seconds:.0f}", "-p", str(why.engine(kind).pid)]
        sampling = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            until = time.monotonic() + seconds
            while time.monotonic() < until and sampling.poll() is None:
                why.run(why.work(kind))
            sampling.wait(PATIENCE_S)
        finally:
            sampling.kill()
            sampling.wait()
        if not path.exists():
            found.notes = ["samples of the interpreter lock: py-spy may not read the process"]
            return
        rows += [[kind, *row] for row in holders(path.read_text())]
        columns = ["kind", "thread", "share of samples, %", "most in"]
        title = "Who holds the interpreter lock"
        found.tables = [{"title": title, "columns": columns, "rows": rows}]
        why.so_far("gil", found)


def holders(text: str) -> list[list[Any]]:
    """Thread, share, and the function with the most samples, of py-spy's raw stacks. The clock's
    own functions count as those that call them.
    """
    threads: Counter[str] = Counter()
    inner: dict[str, Counter[str]] = {}
    for line in text.splitlines():
        stack, _, count = line.rpartition(" ")
        thread, *frames = stack.split(";")
        name = thread.partition(": ")[2] or thread
        threads[name] += int(count)
        of_product = [frame for frame in frames if "step_clock.py" not in frame]
        inner.setdefault(name, Counter())[(of_product or [thread])[-1]] += int(count)
    whole = sum(threads.values())
    return [
        [name, round(100 * count / whole, 1), inner[name].most_common(1)[0][0]]
        for name, count in threads.most_common(NAMES)
    ]


def list_profiles(why: Why, found: Found) -> None:
    why.start()
    rows: list[list[Any]] = []
    for kind in KINDS:
        path = why.asked.out / f"profile-{kind}.json"
        why.run(why.work(kind, profile=str(path)))
        rows += [[kind, *row] for row in streams_of(json.loads(path.read_text()))]
        columns = ["kind", "stream", "operations", "ms", "idle ms between", "longest in all"]
        found.tables = [
            {"title": f"{PROFILED} steps as the profiler lists them", "columns": columns}
            | {"rows": rows}
        ]
        found.notes = [f"lists of name, stream, start and length: {path.parent}/profile-*.json"]
        why.so_far("profile", found)


def streams_of(events: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Of each of the device's streams: operations, ms, gaps, and the names that take longest; of a
    CPU, of its threads.
    """
    on_device = [event for event in events if event[1] == "CUDA"]
    streams: dict[Any, list[Sequence[Any]]] = {}
    for event in on_device or events:
        streams.setdefault(event[2], []).append(event)
    rows = []
    for stream, of_stream in sorted(streams.items(), key=lambda item: -len(item[1]))[:3]:
        took: Counter[str] = Counter()
        end = gaps = 0
        for name, _, _, start, length in sorted(of_stream, key=lambda event: event[3]):
            gaps += max(0, start - end) if end else 0
            end = max(end, start + length)
            took[name] += length
        names = "; ".join(f"{name[:40]} {ns / 1e6:.2f}" for name, ns in took.most_common(3))
        total = sum(took.values()) / 1e6
        rows.append([stream, len(of_stream), round(total, 2), round(gaps / 1e6, 2), names])
    return rows


def measure_prompts(why: Why, found: Found) -> None:
    why.start()
    tags = ["memory", *(["huge"] if why.huge else []), "disk"]
    size = {"prompt": 48, "generated": 8} if why.asked.tiny else {"prompt": 512, "generated": 16}
    size["requests"] = fitting(why.requests, size["prompt"]) if why.asked.gpu else why.requests
    works = {tag: why.work("prompts", tag=tag, **size) for tag in tags}
    works["stock"] = why.work("stock", **size)
    why.run(works["memory"])
    disk: list[float] = []

    def after(runs: dict[str, Any]) -> None:
        disk.append(kit.disk_rate(why.asked.out / "rate", 1 << 20 if why.asked.tiny else 1 << 30))
        found.figures = prompt_figures(runs, tags, disk)
        found.tables = [prompts_table(runs), rows_table({tag: runs[tag][-1] for tag in tags})]
        why.so_far("prompts", found)

    why.rounds(works, FEW, after)
    if not why.huge:
        found.notes = ["files in memory with huge pages: they cannot be mounted here"]


def fitting(requests: int, prompt: int) -> int:
    """So many of the requests' rows fit into files in memory."""
    config = kit.shape("8b")
    each = 2 * config["num_hidden_layers"] * config["hidden_size"] * prompt
    return max(1, min(requests, int(SPARE * shutil.disk_usage("/dev/shm").free) // each))


def measure_many(why: Why, found: Found) -> None:
    why.start()
    works = {kind: why.work(kind, requests=why.many) for kind in KINDS}

    def after(runs: dict[str, Any]) -> None:
        last = {kind: of_kind[-1:] for kind, of_kind in runs.items()}  # the first warms up
        found.figures = {f"many_{name}": each for name, each in ratios(last).items()}
        title = f"With {why.many} requests"
        found.tables = [steps_table(last, title), causes_table(last, title)]
        why.so_far("many", found)

    why.rounds(works, FEW, after)


def measure_processes(why: Why, found: Found) -> None:
    """The same with scheduler and model runner in two processes."""
    why.start("mp")
    works = {kind: why.work(kind) for kind in KINDS}
    for work in works.values():
        why.run(work)

    def after(runs: dict[str, Any]) -> None:
        found.figures = {f"mp_{name}": each for name, each in ratios(runs).items()}
        found.tables = [steps_table(runs, "Executor mp")]
        why.so_far("mp", found)

    why.rounds(works, ROUNDS - 1, after)
    found.notes = [
        "executor mp: parts within the rank's process are not timed",
        *([] if why.asked.gpu else ["on a CPU: without the timed device, stock as well"]),
        *why.facts(),
    ]


# --- Figures and tables


def ratios(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, float]]:
    """Of each kind: its slope and its longest step, of stock's."""
    found, stock = {}, runs["stock"]
    for kind, of_kind in runs.items():
        if kind != "stock":
            pairs = list(zip(of_kind, stock, strict=False))
            found[kind] = kit.figure([run["slope"] / other["slope"] for run, other in pairs])
            longest = max(run["longest"] for run in of_kind)
            median = statistics.median(run["median"] for run in stock)
            found[f"longest_{kind}"] = {"value": longest / median}
    return found


def _middle(runs: Sequence[Mapping[str, Any]], *place: str) -> float:
    """The runs' median of the number at this place; 0 where there is none."""
    values = []
    for run in runs:
        value: Any = run
        for name in place:
            value = value.get(name, {})
        values.append(value or 0.0)
    return round(statistics.median(values), 3)


def steps_table(runs: Mapping[str, Any], title: str = "Steps") -> dict[str, Any]:
    columns = ["slope", "median", "p95", "longest", "busy", "first_ms", "full_ms", "end_ms"]
    rows = [
        [
            kind,
            *(_middle(of_kind, name) for name in columns),
            *(_middle(of_kind, "device", name) for name in causes.BETWEEN),
        ]
        for kind, of_kind in runs.items()
    ]
    shown = ["slope", "median", "95 %", "longest", "busy", "first token", "all decode", "end"]
    shown += [f"device: {name}" for name in causes.BETWEEN]
    return {"title": f"{title}, ms", "columns": ["kind", *shown], "rows": rows}


def parts_tables(runs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Parts of a step, and threads."""
    kinds = list(runs)
    threads = {name for of_kind in runs.values() for run in of_kind for name in run["threads"]}

    def cell(of_kind: Any, part: str) -> str:
        used = _middle(of_kind, "parts", part, "cpu")
        taken, high, most = (
            _middle(of_kind, "parts", part, "wall", name) for name in ("mean", "p95", "longest")
        )
        return f"{used:.2f} / {taken:.2f} ({high:.1f}, {most:.1f})"

    rows = [
        [part, *(cell(runs[kind], part) for kind in kinds)] for part in runs["stock"][0]["parts"]
    ]
    of_threads = [
        [name, *(_middle(runs[kind], "threads", name) for kind in kinds)]
        for name in sorted(threads)
    ]
    title = "Parts of a step, ms on the processor / in all (95 %, longest)"
    return [
        {"title": title, "columns": ["part", *kinds], "rows": rows},
        {
            "title": "Threads, ms on a processor a step",
            "columns": ["thread", *kinds],
            "rows": [row for row in of_threads if max(row[1:]) >= causes.LEAST_MS],
        },
    ]


def causes_table(runs: Mapping[str, Any], title: str = "") -> dict[str, Any]:
    rows = []
    for kind, cause in causes.attribute(runs).items():
        largest = sorted(cause.parts.items(), key=lambda item: -item[1])[:4]
        more = ", ".join(f"{name} {took:.2f}" for name, took in largest)
        where = cause.named and f"{cause.named}{' (hidden)' if cause.hidden else ''}"
        rows.append([kind, round(cause.slope, 2), where or "none", more])
    columns = ["kind", "added to stock's slope", "named", "largest extras"]
    head = f"{title}: what is added" if title else "What is added"
    return {"title": f"{head}, ms", "columns": columns, "rows": rows}


def named(found: Mapping[str, causes.Cause]) -> list[str]:
    return [
        f"{kind}: {cause.named or 'no part'} takes most of what is added"
        f"{', behind the device' if cause.hidden else ''}"
        for kind, cause in found.items()
    ]


def switches_table(
    found: Mapping[str, causes.Cause], busy: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    def share(took: float, cause: causes.Cause) -> str:
        return f"{100 * took / cause.slope:.0f} %" if cause.slope > causes.LEAST_MS else "–"

    rows = [
        [kind, switch, round(took, 3), share(took, cause), round(busy[kind][switch], 3)]
        for kind, cause in found.items()
        for switch, took in cause.switches.items()
    ]
    columns = ["kind", "part", "ms a step", "of what is added to stock's", "ms the thread is busy"]
    return {"title": "What each part costs, by a switch", "columns": columns, "rows": rows}


def prompt_figures(
    runs: Mapping[str, Any], tags: Sequence[str], disk: Sequence[float]
) -> dict[str, dict[str, float]]:
    found = {}
    for tag in tags:
        rates = [run["bytes"] / run["durable"] for run in runs[tag]]
        pairs = zip(runs[tag], runs["stock"], strict=False)
        found[f"rate_{tag}"] = kit.figure(rates, 1e-9)
        found[f"prompt_{tag}"] = kit.figure([run["seconds"] / of["seconds"] for run, of in pairs])
        if tag == "disk":
            shares = [rate / own for rate, own in zip(rates, disk, strict=False)]
            found["disk_share"] = kit.figure(shares, 100)
    return found


def prompts_table(runs: Mapping[str, Any]) -> dict[str, Any]:
    rows = []
    for tag, of_tag in runs.items():
        seconds = [_middle(of_tag, name) for name in ("seconds", "durable")]
        gigabytes = _middle(of_tag, "bytes") / 1e9
        used = [_middle(of_tag, "threads_s", name) for name in ("the model's", "midstream-writer")]
        each = [round(took / gigabytes, 3) if gigabytes else "–" for took in used]
        rows.append([tag, *seconds, round(gigabytes, 3), *each])
    columns = ["files", "last token, s", "durable, s", "GB"]
    columns += ["model's thread, s/GB", "writers, s/GB"]
    return {"title": "Prompts with every layer captured", "columns": columns, "rows": rows}


def rows_table(runs: Mapping[str, Any]) -> dict[str, Any]:
    """Looks at the rows of a run, at even distances."""
    rows = []
    for tag, run in runs.items():
        series = run["series"]
        looks = {max(0, len(series) * (look + 1) // LOOKS - 1) for look in range(LOOKS)}
        for number in sorted(looks):
            seconds, *sizes = series[number]
            rows.append([tag, round(seconds, 3), *(round(size / 1e9, 3) for size in sizes)])
    columns = ["files", "s", "in memory, GB", "written, GB"]
    return {"title": "Captured rows over time, of the last run", "columns": columns, "rows": rows}


# --- The stage


#: Part → seconds on a GPU, of which the stage's own time is shared out. The parts that decide come
#: first.
PARTS: dict[str, tuple[float, Callable[[Why, Found], None]]] = {
    "constants": (18, measure_constants),
    "sites": (8, measure_sites),
    "start": (62, start_engines),
    "rounds": (34, measure_rounds),
    "switches": (26, measure_switches),
    "gil": (14, sample_gil),
    "profile": (8, list_profiles),
    "prompts": (18, measure_prompts),
    "many": (14, measure_many),
    "mp": (46, measure_processes),
}


def run(why: Why, parts: Mapping[str, tuple[float, Callable[[Why, Found], None]]]) -> str:
    """Run the parts that are not done; return what is not."""
    missing = {name: part for name, part in parts.items() if name not in why.done}
    wrong = []
    while missing:
        name = next(iter(missing))
        seconds, part = missing.pop(name)
        share = seconds / (seconds + sum(each for each, _ in missing.values()))
        if why.asked.left <= 0:
            wrong.append(f"{name}: no time was left")
            continue
        # what earlier parts left is shared out
        why.until = time.monotonic() + min(why.asked.left, max(seconds, share * why.asked.left))
        found, began, why.short = Found(), time.monotonic(), ""
        try:
            part(why, found)
        except Exception as error:  # the others go on
            traceback.print_exc()
            wrong.append(f"{name}: {error}")
            found.notes.append(f"{name} was cut after {time.monotonic() - began:.0f} s: {error}")
            why.cut[name] = asdict(found)
            why.so_far(name, found)
            why.close(kill=True)
        else:
            print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
            found.notes += [f"{name}: {why.short}"] if why.short else []
            why.keep(name, found)
    return "; ".join(wrong)


def main() -> None:
    asked = kit.options(__doc__)
    asked.out.mkdir(parents=True, exist_ok=True)
    why = Why(asked)
    try:
        why.finish(run(why, PARTS))
    finally:
        why.end()


if __name__ == "__main__":
    main()
