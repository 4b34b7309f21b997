"""`midstream demo`: runs a capture, steering and a sweep on the real stack with a real model, and
checks each result.
"""

import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from ...schemas.base.errors import MidstreamError
from ...schemas.base.records import to_json
from ...schemas.base.settings import Settings, load_settings
from ...schemas.base.version import __version__
from ...workers.demo_model import MODEL_NAME, fetch_demo_model
from ..captures.reader import CaptureReader
from ..render import jobs, sweeps
from ..render import steering as show_steering
from ..render.steering import DIGEST
from ..sdk.client import Client
from ..sdk.wire import Answer
from ..stack.processes import sigterm_as_interrupt, wait_for
from ..stack.supervisor import LOCK_FILE, Supervisor, read_state
from ..study.patch_study import PatchStudy

#: Seconds that killed processes may take to end: an engine frees gigabytes.
END_S = 5.0
FACTS = (
    "The Eiffel Tower is located in the city of",
    "The capital of Japan is",
    "Water is made of hydrogen and",
    "The opposite of hot is",
    "Monday, Tuesday, Wednesday,",
    "The author of Romeo and Juliet is William",
)
FACT_TOKENS = 6
#: The demo model's shape; every capture must have it.
NUM_LAYERS = 30
HIDDEN_SIZE = 576

#: Contrasting texts; the direction is the difference of their mean activations (Turner et al. 2023,
#: arXiv:2308.10248).
SEA = (
    "The ocean waves crash on the sandy beach",
    "A ship sails across the deep blue sea",
    "Fish and whales swim in the salty ocean water",
    "The sailor watched the tide from his boat",
)
LAND = (
    "The office printer is out of paper again",
    "A train crosses the dry inland plain",
    "Cars and trucks drive on the busy city road",
    "The accountant watched the numbers on his screen",
)
STEERED = (
    "My favourite thing to do at the weekend is",
    "The old man told us a story about",
    "I close my eyes and I can hear",
)
STEER_TOKENS = 32
LAYER = 14
SCALE = 1.0
#: The direction's name.
MODULE = "sea"
#: Leading tokens to leave out: the first token is an attention sink, whose activation is a hundred
#: times larger than the others and does not depend on the text.
SINK_TOKENS = 1
#: Two prompts of the same form; activations of the first are patched into the second.
CLEAN, ANSWER = FACTS[0], " Paris"
CORRUPT, FOIL = "The Colosseum is located in the city of", " Rome"
HOOK = "resid_pre"
#: The smallest share that patching the last layer's input at the last token must recover. It is not
#: 1, because the last layer itself also contributes.
LEAST_AT_THE_END = 0.8
#: Patching the subject's rows must recover at least the first share in an early layer, and at most
#: the second share in the last layer, where the last token has already read them.
LEAST_AT_THE_SUBJECT, MOST_WHEN_READ = 0.3, 0.1
#: The smallest share of the edit that must remain one layer later; below 1, because that layer also
#: adds to the stream.
LEAST_SHIFT = 0.5


@dataclass(frozen=True)
class Shift:
    """Expected and measured movement of the stream along a steering vector's direction."""

    expected: float
    measured: float


class Verdict:
    """Prints the result of each check, and collects the checks that failed."""

    def __init__(self, console: Console):
        self._console = console
        self.failed: list[str] = []

    def check(self, holds: bool, claim: str) -> None:
        _line(self._console, f"[green]✓[/] {claim}" if holds else f"[red]✗ {claim}[/]")
        if not holds:
            self.failed.append(claim)


def run_demo(
    data: Path | None = None, console: Console | None = None, *, keep: bool = False
) -> int:
    """Start a separate stack, and run the demo on it; return the exit code.

    `data`: the data directory, by default `demo/` in the setting `data_dir`, re-created.

    `keep`: leave the stack and its page open until Ctrl-C.
    """
    console = console or Console(highlight=False)
    began = time.monotonic()
    console.rule(
        f"[bold]Midstream {__version__}[/]: activation capture, steering and patching on stock vLLM"
    )
    settings = _settings(data, console)
    with (
        sigterm_as_interrupt(),
        _started(settings, console) as stack,
        Client(stack.url, stack.settings.admin_key) as client,
    ):
        verdict = Verdict(console)
        job = demonstrate(client, Path(stack.settings.data_dir), console, verdict)
        console.print()
        _line(
            console,
            f"the page: [bold]{stack.url}/[/]"
            + (" · open until Ctrl-C" if keep else " · [dim]--keep leaves it open[/]"),
        )
        if keep:
            with suppress(KeyboardInterrupt):
                signal.pause()
    ended = wait_for(lambda: not stack.survivors(), END_S)
    verdict.check(ended, "everything stopped, no process left behind")
    _farewell(console, stack.settings, job, time.monotonic() - began)
    if verdict.failed:
        console.print(
            f"[red]{len(verdict.failed)} of the checks failed[/]; logs: "
            f"{Path(stack.settings.data_dir) / 'logs'}"
        )
        return 1
    return 0


def run_demo_at(url: str, keep: Path | None = None, console: Console | None = None) -> int:
    """Run the demo on a running stack; return the exit code.

    `keep`: the folder for the figure, by default the working directory.

    Raises MidstreamError if the demo model is not served there, or if the demo's module already
    exists. The module that the demo registers is removed at the end.
    """
    console = console or Console(highlight=False)
    began = time.monotonic()
    console.rule(
        f"[bold]Midstream {__version__}[/]: activation capture, steering and patching on stock vLLM"
    )
    folder = (keep or Path()).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with Client(url, load_settings().api_key) as client:
        if MODEL_NAME not in (served := client.models()):
            raise MidstreamError(
                "not_found",
                f"{url} does not serve {MODEL_NAME}, which the demo requires",
                allowed=", ".join(served),
            )
        if MODULE in {module.name for module in client.modules.list(MODEL_NAME)}:
            raise MidstreamError(
                "conflict", f"{url} already has a module {MODULE!r}, which the demo would replace"
            )
        _line(console, f"[green]✓[/] stack: [bold]{url}[/]")
        verdict = Verdict(console)
        try:
            demonstrate(client, folder, console, verdict)
        finally:
            if MODULE in {module.name for module in client.modules.list(MODEL_NAME)}:
                client.modules.delete(MODULE, MODEL_NAME)
    console.print()
    console.rule(f"[bold]Done in {time.monotonic() - began:.0f} s[/]", align="left")
    if verdict.failed:
        console.print(f"[red]{len(verdict.failed)} of the checks failed[/]")
    return 1 if verdict.failed else 0


def demonstrate(client: Client, folder: Path, console: Console, verdict: Verdict) -> str:
    """Patch, capture and steer the served demo model, and write the figure into `folder`. Return
    the id of the first capturing job.
    """
    _patch(client, MODEL_NAME, folder, console, verdict)
    job = _capture(client, MODEL_NAME, console, verdict)
    _steer(client, MODEL_NAME, console, verdict)
    return job


@contextmanager
def _started(settings: Settings, console: Console) -> Iterator[Supervisor]:
    """Start the stack, and stop it at the end; a line counts the seconds while it starts.

    The line is redrawn by the supervisor's wait, because no thread may run while it forks.
    """
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        progress.add_task(
            "Redis, relay, worker, API, callbacks, Flower; the engine takes about half a minute"
        )
        stack = Supervisor(settings, say=lambda line: None, waiting=progress.refresh)
        stack.start()
    try:
        _line(
            console,
            (
                f"[green]✓[/] stack up: [bold]{stack.url}[/] · API docs {stack.url}/schema · "
                f"dashboard {stack.flower_url or 'none'}"
            ),
        )
        yield stack
    finally:
        _line(console, "stopping the stack …")
        stack.stop()


def _settings(data: Path | None, console: Console) -> Settings:
    """Return the user's settings with free ports, the demo model and a separate data directory."""
    base = load_settings()
    folder = Path(data or Path(base.data_dir) / "demo").expanduser().resolve()
    if data is None and (folder / LOCK_FILE).exists() and not _in_use(folder):
        shutil.rmtree(folder)  # left by an earlier demo
    with console.status("the demo model …"):
        model = fetch_demo_model(
            Path(base.cache_dir), say=lambda line: console.print(f"  {escape(line)}", style="dim")
        )
    _line(
        console,
        (
            f"[green]✓[/] model: {MODEL_NAME}, {NUM_LAYERS} layers, hidden size "
            f"{HIDDEN_SIZE} [dim]({_short(model)})[/]"
        ),
    )
    return load_settings(
        model=str(model),
        model_name=MODEL_NAME,
        data_dir=str(folder),
        api_port=0,
        flower_port=0,
        redis_url="",
        relay_url="",
    )


def _capture(client: Client, model: str, console: Console, verdict: Verdict) -> str:
    """Capture every layer at every prompt token, and check the rows; return the id of the first
    job.
    """
    console.print()
    console.rule(
        "[bold]Capture[/]: every layer at every prompt token, answered once all rows are on disk",
        align="left",
    )
    spec = {"layers": "all", "positions": "all_prompt", "tag": "demo"}

    def ask(prompt: str) -> Answer:
        return client.completion(
            model, prompt, capture=spec, capture_wait=True, max_tokens=FACT_TOKENS, temperature=0
        )

    answers = _all([partial(ask, prompt) for prompt in FACTS], "held responses", console)
    for prompt, answer in zip(FACTS, answers, strict=True):
        _line(
            console, f"[dim]{escape(prompt)}[/][bold]{escape(answer.text.replace(chr(10), ' '))}[/]"
        )
    console.print()
    console.print(_receipts("Receipts: each rank's report on each request", answers))
    readers = [client.capture(answer.job) for answer in answers]
    _draw_norms(console, readers[0], FACTS[0])
    statuses = [
        answer.capture_results.status if answer.capture_results else "missing" for answer in answers
    ]
    verdict.check(
        statuses == ["ok"] * len(FACTS),
        f"{statuses.count('ok')}/{len(FACTS)} captures complete when the response arrived",
    )
    checks = [check for reader in readers for check in reader.verify()]
    total = jobs.size(sum(check.bytes for check in checks))
    verdict.check(
        all(check.ok for check in checks),
        f"CRC32 of {len(checks)} files ({total}) recomputed and correct",
    )
    stacks = [reader.stack() for reader in readers]
    shapes = all(
        stack.shape == (NUM_LAYERS, len(reader.token_ids()), HIDDEN_SIZE)
        for stack, reader in zip(stacks, readers, strict=True)
    )
    rows = sum(stack.shape[0] * stack.shape[1] for stack in stacks)
    finite = all(bool(np.isfinite(stack).all()) for stack in stacks)
    verdict.check(
        shapes and finite,
        f"{rows} rows: {NUM_LAYERS} layers × every token × {HIDDEN_SIZE}, all finite",
    )
    agree = all(
        answer.determinism is not None and answer.determinism.consistent for answer in answers
    )
    verdict.check(agree, "determinism: checksums and action counts of all ranks agree")
    verdict.check(
        "Paris" in answers[0].text, "and the model answers that the Eiffel Tower is in Paris"
    )
    return answers[0].job


def _steer(client: Client, model: str, console: Console, verdict: Verdict) -> None:
    """Complete prompts without and with steering by a module, show both, and check the ranks."""
    console.print()
    console.rule(
        (
            "[bold]Steering[/]: a direction computed from captures, registered as a "
            f"module, added at layer {LAYER}"
        ),
        align="left",
    )
    spec = {"layers": LAYER, "positions": "all_prompt", "tag": "direction"}
    source = client.run(
        model=model, prompts=[*SEA, *LAND], capture=spec, sampling={"max_tokens": 1}
    )
    reader = client.capture(source.id)
    means = np.stack(
        [
            reader.array(LAYER, request=request)[SINK_TOKENS:].mean(0)
            for request in reader.requests()
        ]
    )
    direction = means[: len(SEA)].mean(0) - means[len(SEA) :].mean(0)
    norm = float(np.linalg.norm(direction))
    typical = float(np.linalg.norm(means, axis=1).mean())
    sets = f"mean of {len(SEA)} texts about the sea − mean of {len(LAND)} others"
    _line(console, f"{sets}: norm {norm:.1f}, mean norm of the activations {typical:.1f}")
    module = client.modules.register(MODULE, {f"post_block.{LAYER}": direction}, model, sets)
    push = [{"module": MODULE, "scale": SCALE}]
    _line(
        console,
        (
            f"registered as module {MODULE}, digest {module.digest[:DIGEST]}; a request "
            f"uses {escape(to_json(push).decode())}"
        ),
    )

    def ask(steering: list[dict[str, Any]]) -> Answer:
        capture = {
            "layers": LAYER + 1,
            "positions": "all_prompt",
            "tag": "steered" if steering else "plain",
        }
        return client.completion(
            model,
            list(STEERED),
            steering=steering,
            capture=capture,
            capture_wait=True,
            max_tokens=STEER_TOKENS,
            temperature=0,
        )

    plain, steered = _all(
        [partial(ask, []), partial(ask, push)], "plain and steered, concurrently", console
    )
    for index, prompt in enumerate(STEERED):
        console.print(f"\n  [bold]{escape(prompt)} …[/]")
        jobs.side_by_side(
            console,
            ("unsteered", plain.texts[index]),
            (f"+ {SCALE:g} · {MODULE}", steered.texts[index]),
        )
    console.print()
    console.print(_receipts("Receipts of the steered completions", [steered]))
    shift = _shift(client.capture(plain.job), client.capture(steered.job), direction)
    verdict.check(
        plain.texts != steered.texts, "the steered completions differ from the plain ones"
    )
    moved = (
        f"at layer {LAYER + 1} the stream moved {shift.measured:.1f} along the direction "
        f"(pushed by {shift.expected:.1f})"
    )
    verdict.check(shift.measured >= LEAST_SHIFT * shift.expected, moved)
    applied = (
        sum(report.applied for stage in steered.determinism.stages for report in stage.ranks)
        if steered.determinism
        else 0
    )
    verdict.check(applied > 0, f"receipts: {applied} token rows changed")
    agree = steered.determinism is not None and steered.determinism.consistent
    verdict.check(agree, jobs.determinism_line(steered.determinism))
    _ask_the_ranks(client, console, verdict)


def _patch(client: Client, model: str, folder: Path, console: Console, verdict: Verdict) -> None:
    """Trace the fact that the tower is in Paris (Meng et al. 2022, arXiv:2202.05262), and draw the
    result in the terminal and as a figure.
    """
    console.print()
    console.rule(
        (
            "[bold]Patching[/]: rows of one prompt copied into another, to find where the "
            "answer is computed"
        ),
        align="left",
    )
    study = PatchStudy(CLEAN, CORRUPT, ANSWER, FOIL, client=client, model=model).sweep(hooks=[HOOK])
    result, (pair,) = study.result, study.result.pairs
    console.print(Padding(sweeps.report(result, count=3), (0, 0, 0, 2)))
    summary, grid = result.summary, study.grid()
    path = folder / "sweep.png"
    study.plot(path)
    _line(console, f"[bold]{escape(_short(path))}[/]: the same heatmap as a figure")
    took = f" in {summary.seconds:.1f} s" if summary.seconds else ""
    verdict.check(
        summary.cells + summary.skipped == summary.total,
        f"{summary.cells} cells, each confirmed by every rank{took}; {summary.skipped} skipped",
    )
    knows = [
        item is not None and item.value * sign > 0
        for item, sign in ((pair.source, 1), (pair.base, -1))
    ]
    verdict.check(
        all(knows), "unpatched, the model answers Paris for one prompt and Rome for the other"
    )
    values = np.nan_to_num(grid.values[grid.hooks[0]])
    verdict.check(
        values[-1, -1] >= LEAST_AT_THE_END,
        f"the last token in the last layer recovers {values[-1, -1]:.0%}",
    )
    layer, column = np.unravel_index(values[:, :-1].argmax(), values[:, :-1].shape)
    value, late = values[layer, column], values[-1, column]
    early = (
        f"earlier, at the subject: “{grid.names[column]}” alone recovers {value:.0%} in "
        f"layer {layer}, {late:.0%} in the last"
    )
    verdict.check(value >= LEAST_AT_THE_SUBJECT and late <= MOST_WHEN_READ, early)
    floor = pair.noise_floor
    verdict.check(
        floor is not None and floor < value,
        f"noise floor, from patches of a prompt with its own rows: {floor or 0:.2g}",
    )


def _ask_the_ranks(client: Client, console: Console, verdict: Verdict) -> None:
    """Query the ranks, as `midstream dynamic` does."""
    console.print("\n  [dim]$ midstream dynamic[/]")
    result = client.global_steering.dynamic(MODEL_NAME)
    for worker in result.workers:
        _line(console, show_steering.worker_line(worker))
        console.print(show_steering.ranks(worker, result.determinism))
    verdict.check(result.determinism.consistent, show_steering.agreement_line(result))


def _shift(plain: CaptureReader, steered: CaptureReader, direction: np.ndarray) -> Shift:
    """Return the mean projection of (steered − plain) on the direction, over the prompt tokens
    after the sink.
    """
    unit = direction / np.linalg.norm(direction)
    moved = [
        (steered.array(LAYER + 1, request=request) - plain.array(LAYER + 1, request=request))[
            SINK_TOKENS:
        ]
        @ unit
        for request in plain.requests()
    ]
    return Shift(
        expected=SCALE * float(np.linalg.norm(direction)),
        measured=float(np.concatenate(moved).mean()),
    )


def _all(calls: list[Callable[[], Answer]], title: str, console: Console) -> list[Answer]:
    """Make calls concurrently, with a progress bar; return their results in order."""
    columns = (
        TextColumn("  {task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress, ThreadPoolExecutor(len(calls)) as pool:
        task = progress.add_task(title, total=len(calls))
        futures = [pool.submit(call) for call in calls]
        for _ in as_completed(futures):
            progress.advance(task)
        return [future.result() for future in futures]


def _receipts(title: str, answers: list[Answer]) -> Table:
    return jobs.receipts(
        title, [(answer.job, answer.capture_results, answer.determinism) for answer in answers]
    )


def _draw_norms(console: Console, reader: CaptureReader, prompt: str) -> None:
    """Draw the norm of the stream at the last prompt token, layer by layer."""
    norms = np.linalg.norm(reader.stack()[:, -1, :], axis=-1)
    levels = np.clip(norms / norms.max() * 8, 0, 7).astype(int)
    line = "".join("▁▂▃▄▅▆▇█"[level] for level in levels)
    _line(
        console,
        f"the stream's norm at the last token of “{escape(prompt)}”, layer 0 to {len(norms) - 1}:",
    )
    _line(console, f"[cyan]{line}[/]  {norms[0]:.0f} → {norms[-1]:.0f}\n")


def _farewell(console: Console, settings: Settings, job: str, seconds: float) -> None:
    store, arguments = _store_of(settings, job)
    command = _command()
    console.print()
    console.rule(f"[bold]Done in {seconds:.0f} s[/]", align="left")
    _line(console, f"captures: {escape(store)}\n")
    _line(console, "Try next:")
    tries = (
        (
            f"{command} capture show {arguments} --values {LAYER}",
            "print the rows of the first prompt",
        ),
        (f"{command} up", "run the stack until Ctrl-C; then, in another terminal:"),
        (
            f'{command} submit "The sky is" --layers all --positions all_prompt',
            "capture the activations of your own prompt",
        ),
        (
            f'{command} sweep --clean "{CLEAN}" --corrupt "{CORRUPT}" --answer "{ANSWER}" '
            f'--foil "{FOIL}" '
            "--hooks attn_out,mlp_out --heatmap sweep.png",
            "find the layers whose attention moves the answer to the last token",
        ),
    )
    for line, why in tries:
        _line(console, f"  [dim]# {why}[/]")
        _line(console, f"  [bold]{escape(line)}[/]")
    console.print()


def _store_of(settings: Settings, job: str) -> tuple[str, str]:
    """Return the artifact store, and the arguments of `capture show` for the job."""
    store = settings.artifacts
    if "://" in store:
        return store, f"{shlex.quote(store)} --job {job}"
    return _short(Path(store)), shlex.quote(_short(Path(store) / "demo" / job))


def _line(console: Console, text: str) -> None:
    """Print one line without wrapping, so that paths and addresses can be copied whole."""
    console.print(f"  {text}", soft_wrap=True)


def _command() -> str:
    """Return the shortest command that starts this program from the working directory."""
    called = Path(sys.argv[0])
    if called.name != "midstream":
        return f"{_short(Path(sys.executable))} -m midstream.client.cli.main"
    return _short(called.absolute()) if called.parent != Path(".") else "midstream"


def _short(path: Path) -> str:
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _in_use(folder: Path) -> bool:
    """Return whether a supervisor may still use the folder; it then reports the conflict itself."""
    return bool(read_state(folder))
