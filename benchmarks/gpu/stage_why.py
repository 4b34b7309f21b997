"""Why a step takes longer than stock vLLM's: constants of the machine, then one engine of stock and
one of ours in turns, with each part of a step, the device and each switch apart.

The stage has parts, each with a share of its time and a result that is left when it is over; one
that takes longer is cut, and says so. Of other models (`--model`) only the rounds are run. With
`--device cpu` the engines run on the timed device (`timed_device.py`), and what needs a GPU is left
out.
"""

import shutil
import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import causes
import constants
import kit
import step_clock
from stepped_engine import KINDS, Child, Setup, Work

#: An engine that is not ready, or does not answer, so long after the time of its part is killed.
START_S = 90.0
PATIENCE_S = 20.0
#: ms a step on a processor below which a thread is not shown.
LEAST_MS = 0.05
ROUNDS = 4
SWITCHED_ROUNDS = 2
FEW = 2
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
        self.asked = asked
        self.device = "cuda" if asked.gpu else "timed"
        self.requests, self.many = (8, 16) if asked.tiny else (64, 256)
        self.generated, self.prompt = (32, 16) if asked.tiny else (128, 32)
        self.until = time.monotonic() + asked.left
        self.short = ""  # what the part that runs had no time for
        self._engines: dict[str, Child] = {}
        self.found: dict[str, Found] = {}  # by part
        self.memory = kit.memory_folder(asked.out)

    # --- Time and results

    @property
    def left(self) -> float:
        """Seconds until the part that runs has to end."""
        return self.until - time.monotonic()

    def so_far(self) -> None:
        kit.so_far(self.asked, self.result())

    def result(self) -> dict[str, Any]:
        result: dict[str, Any] = {"figures": {}, "tables": [], "notes": []}
        for found in self.found.values():
            result["figures"] |= found.figures
            result["tables"] += found.tables
            result["notes"] += found.notes
        return result

    # --- Engines

    def start(self) -> dict[str, float]:
        """Have an engine of stock and one of ours. Return the seconds in which each was ready,
        which are not the running part's.
        """
        began = time.monotonic()
        tags = {"memory": self.memory / "small", "disk": self.asked.out / "disk"}
        for name in ("stock", "ours"):
            if name in self._engines and not self._engines[name].over:
                continue
            self._engines[name] = Child(
                Setup(
                    name,
                    self.device,
                    self.many,
                    model=self.asked.model,
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
        return self._engines["stock" if kind == "stock" else "ours"]

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
        return replace(Work(kind, self.requests, self.prompt, self.generated), **more)

    def run(self, work: Work) -> dict[str, Any]:
        return self.engine(work.kind).run(work, max(0.0, self.left) + PATIENCE_S)

    def rounds(
        self, works: Mapping[Any, Work], count: int, after: Callable[[dict[Any, Any]], None]
    ) -> dict[Any, list[dict[str, Any]]]:
        """Each work once in a round, in an order that rotates, until there are so many rounds or
        the time is over. `after` is called with what there is after each whole round.
        """
        runs: dict[Any, list[dict[str, Any]]] = {name: [] for name in works}
        names = list(works)
        took = 0.0
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
    gpu = why.asked.gpu
    tiny = why.asked.tiny
    rows: list[constants.Row] = []
    folders = {"memory": why.memory / "rate", "the disk's folder": why.asked.out / "rate"}
    for measure in (
        lambda: constants.interpreter(gpu=gpu, tiny=tiny),
        lambda: constants.copies(gpu=gpu, tiny=tiny),
        lambda: constants.files(folders, tiny=tiny, left=lambda: why.left),
    ):
        rows += measure()
        found.tables = [constants.table("Constants of the machine", rows)]
        why.so_far()


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
        found.tables = [steps_table(runs), *parts_tables(runs)]
        why.so_far()

    runs = why.rounds(works, ROUNDS, after)
    found.notes = [f"{len(runs['stock'])} rounds of {why.requests} requests"]


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
        found.tables = [switches_table(causes.effects(runs), causes.effects(runs, "busy"))]
        why.so_far()

    why.rounds(works, SWITCHED_ROUNDS, after)
    found.notes = ["without the copies, captured rows are not those of the model"]


def measure_prompts(why: Why, found: Found) -> None:
    why.start()
    tags = ["memory", "disk"]
    size = {"prompt": 48, "generated": 8} if why.asked.tiny else {"prompt": 512, "generated": 16}
    size["requests"] = fitting(why.requests, size["prompt"]) if why.asked.gpu else why.requests
    works = {tag: why.work("prompts", tag=tag, **size) for tag in tags}
    works["stock"] = why.work("stock", **size)
    why.run(works["memory"])
    disk: list[float] = []

    def after(runs: dict[str, Any]) -> None:
        disk.append(kit.disk_rate(why.asked.out / "rate", 1 << 20 if why.asked.tiny else 1 << 30))
        found.figures = prompt_figures(runs, tags, disk)
        found.tables = [prompts_table(runs)]
        why.so_far()

    why.rounds(works, FEW, after)


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
        found.tables = [steps_table(last, title)]
        why.so_far()

    why.rounds(works, FEW, after)


# --- Figures and tables


def ratios(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, float]]:
    """Of each kind: its slope and its longest step, of stock's."""
    found = {}
    stock = runs["stock"]
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
            *(_middle(of_kind, "device", name) for name in step_clock.SPANS),
        ]
        for kind, of_kind in runs.items()
    ]
    shown = ["slope", "median", "95 %", "longest", "busy", "first token", "all decode", "end"]
    shown += [f"device: {name}" for name in step_clock.SPANS]
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
            "rows": [row for row in of_threads if max(row[1:]) >= LEAST_MS],
        },
    ]


def switches_table(
    took: Mapping[str, Mapping[str, float]], busy: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    rows = [
        [kind, switch, round(of_step, 3), round(busy[kind][switch], 3)]
        for kind, switches in took.items()
        for switch, of_step in switches.items()
    ]
    columns = ["kind", "part", "ms a step", "ms the thread is busy"]
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


# --- The stage


#: Part → seconds on a GPU, of which the stage's own time is shared out. The parts that decide come
#: first.
PARTS: dict[str, tuple[float, Callable[[Why, Found], None]]] = {
    "constants": (18, measure_constants),
    "sites": (8, measure_sites),
    "start": (62, start_engines),
    "rounds": (34, measure_rounds),
    "switches": (26, measure_switches),
    "prompts": (18, measure_prompts),
    "many": (14, measure_many),
}


#: Parts that are run of other models than the 8B.
OF_OTHERS = ("start", "rounds")


def run(why: Why, parts: Mapping[str, tuple[float, Callable[[Why, Found], None]]]) -> str:
    """Run the parts; return what went wrong."""
    wrong = []
    whole = sum(seconds for seconds, _ in parts.values())
    for name, (seconds, part) in parts.items():
        # what earlier parts left is shared out
        share = seconds / whole
        whole -= seconds
        why.until = time.monotonic() + min(why.asked.left, max(seconds, share * why.asked.left))
        found = Found()
        began = time.monotonic()
        why.short = ""
        why.found[name] = found
        try:
            if why.asked.left <= 0:
                raise RuntimeError("no time was left")
            part(why, found)
        except Exception as error:  # the others go on
            traceback.print_exc()
            wrong.append(f"{name}: {error}")
            found.notes.append(f"{name} was cut after {time.monotonic() - began:.0f} s: {error}")
            why.close(kill=True)
        found.notes += [f"{name}: {why.short}"] if why.short else []
        print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
        why.so_far()
    return "; ".join(wrong)


def main() -> None:
    asked = kit.options(__doc__)
    asked.out.mkdir(parents=True, exist_ok=True)
    why = Why(asked)
    parts = PARTS if asked.model == "8b" else {name: PARTS[name] for name in OF_OTHERS}
    try:
        wrong = run(why, parts)
        kit.finish(asked, why.result() | ({"wrong": wrong} if wrong else {}))
    finally:
        why.end()


if __name__ == "__main__":
    main()
