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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from midstream.broker.processes.private_files import OWNER_ALONE
from midstream.client import PatchStudy
from midstream.client.captures.reader import CaptureReader
from midstream.client.render import jobs, steering as show_steering
from midstream.client.render.steering import DIGEST
from midstream.client.sdk.client import Client
from midstream.client.sdk.discovery import written
from midstream.client.sdk.wire import Answer
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import to_json
from midstream.schemas.base.version import __version__
from midstream.schemas.settings.settings import Settings, load_settings

from .checks.files import held
from .checks.finding import Check, CheckFinding, findings_of, graded
from .checks.report import Report
from .checks.table import of
from .demo_model import MODEL_NAME, fetch_demo_model
from .processes import sigterm_as_interrupt
from .supervisor import LOCK_FILE, OWN, Supervisor

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
CLEAN = FACTS[0]
ANSWER = " Paris"
CORRUPT = "The Colosseum is located in the city of"
FOIL = " Rome"
HOOK = "resid_pre"
#: The smallest share that patching the last layer's input at the last token must recover. It is not
#: 1, because the last layer itself also contributes.
LEAST_AT_THE_END = 0.8
#: Patching the subject's rows must recover at least the first share in an early layer, and at most
#: the second share in the last layer, where the last token has already read them.
LEAST_AT_THE_SUBJECT = 0.3
MOST_WHEN_READ = 0.1
#: The smallest share of the edit that must remain one layer later; below 1, because that layer also
#: adds to the stream.
LEAST_SHIFT = 0.5


@dataclass
class DemoStage:
    """The demo's client, the folder for its figure, and its report."""

    client: Client
    folder: Path
    report: Report
    job: str = ""  # the first that captured


def run_demo(
    data: Path | None = None,
    url: str | None = None,
    console: Console | None = None,
    *,
    keep: bool = False,
) -> int:
    """Run the demo on a separate stack that is started for it, or on the running stack at `url`;
    return the exit code.

    `data`: the data directory, by default `demo/` in the setting `data_dir`, re-created; with
    `url`, the folder for the figure, by default the working directory.

    `keep`: leave the stack and its page open until Ctrl-C.
    """
    console = console or Console(highlight=False)
    began = time.monotonic()
    console.rule(
        f"[bold]Midstream {__version__}[/]: activation capture, steering and patching on stock vLLM"
    )
    report = Report(console)
    if url is not None:
        folder = (data or Path()).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        with _served(url) as client:
            demonstrate(DemoStage(client, folder, report))
        console.rule(f"[bold]Done in {time.monotonic() - began:.0f} s[/]", align="left")
        return report.end()
    with (
        sigterm_as_interrupt(),
        _started(_settings(data, console), console) as stack,
        Client(stack.url, stack.settings.admin_key) as client,
    ):
        stage = DemoStage(client, Path(stack.settings.data_dir), report)
        demonstrate(stage)
        more = " · open until Ctrl-C" if keep else " · [dim]--keep leaves it open[/]"
        _line(console, f"\n  the page: [bold]{stack.url}/[/]{more}")
        if keep:
            with suppress(KeyboardInterrupt):
                signal.pause()
    report.add(findings_of(of("end"), stack.survivors))
    _farewell(console, stack.settings, stage.job, time.monotonic() - began)
    if report.failed:
        _line(console, f"logs: {Path(stack.settings.data_dir) / 'logs'}")
    return report.end()


@contextmanager
def _served(url: str) -> Iterator[Client]:
    """Connect to a running stack; remove the module that the demo registers at the end.

    Raises MidstreamError if the demo model is not served there, or if the demo's module already
    exists.
    """
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
        try:
            yield client
        finally:
            with suppress(MidstreamError):  # it was not registered
                client.modules.delete(MODULE, MODEL_NAME)


def demonstrate(stage: DemoStage) -> None:
    """Patch, capture and steer the served demo model, and check each result."""
    stage.report.add(findings_of(DEMONSTRATED, stage))


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
        flower = stack.flower_url or "none"
        _line(
            console,
            f"stack up: [bold]{stack.url}[/] · API docs {stack.url}/schema · dashboard {flower}",
        )
        yield stack
    finally:
        _line(console, "stopping the stack …")
        stack.stop()


def _settings(data: Path | None, console: Console) -> Settings:
    """Return the user's settings with free ports, the demo model and a separate data directory."""
    base = load_settings()
    folder = Path(data or Path(base.data_dir) / "demo").expanduser().resolve()
    # `midstream up` keeps other accounts out of it
    folder.parent.mkdir(mode=OWNER_ALONE, parents=True, exist_ok=True)
    # a supervisor that may still use the folder reports the conflict itself
    if data is None and (folder / LOCK_FILE).exists() and not written(folder, own=False).pid:
        shutil.rmtree(folder)  # left by an earlier demo
    with console.status("the demo model …"):
        model = fetch_demo_model(
            Path(base.cache_dir), say=lambda line: console.print(f"  {escape(line)}", style="dim")
        )
    shape = f"{NUM_LAYERS} layers, hidden size {HIDDEN_SIZE}"
    _line(console, f"model: {MODEL_NAME}, {shape} [dim]({_short(model)})[/]")
    return load_settings(model=str(model), model_name=MODEL_NAME, data_dir=str(folder), **OWN)


def _heading(console: Console, title: str, text: str) -> None:
    console.print()
    console.rule(f"[bold]{title}[/]: {text}", align="left")


def _capture(stage: DemoStage) -> Iterator[CheckFinding]:
    """Capture every layer at every prompt token, and check the rows."""
    client = stage.client
    console = stage.report.console
    _heading(
        console,
        "Capture",
        "every layer at every prompt token, answered once all rows are on disk",
    )
    spec = {"layers": "all", "positions": "all_prompt", "tag": "demo"}

    def ask(prompt: str) -> Answer:
        return client.completion(
            MODEL_NAME,
            prompt,
            capture=spec,
            capture_wait=True,
            max_tokens=FACT_TOKENS,
            temperature=0,
        )

    answers = _all([partial(ask, prompt) for prompt in FACTS], "held responses", console)
    for prompt, answer in zip(FACTS, answers, strict=True):
        text = answer.text.replace("\n", " ")
        _line(console, f"[dim]{escape(prompt)}[/][bold]{escape(text)}[/]")
    console.print("\n", _receipts("Receipts: each rank's report on each request", answers))
    readers = [client.capture(answer.job) for answer in answers]
    stage.job = answers[0].job
    _draw_norms(console, readers[0], FACTS[0])
    yield held(client, answers, steered=False)
    stacks = [reader.stack() for reader in readers]
    shapes = all(
        stack.shape == (NUM_LAYERS, len(reader.token_ids()), HIDDEN_SIZE)
        for stack, reader in zip(stacks, readers, strict=True)
    )
    rows = sum(stack.shape[0] * stack.shape[1] for stack in stacks)
    yield graded(
        "rows",
        not (shapes and all(bool(np.isfinite(stack).all()) for stack in stacks)),
        f"{rows} rows: {NUM_LAYERS} layers × every token × {HIDDEN_SIZE}, all finite",
    )
    yield graded(
        "answer",
        "Paris" not in answers[0].text,
        "the model answers that the Eiffel Tower is in Paris",
    )


def _steer(stage: DemoStage) -> Iterator[CheckFinding]:
    """Complete prompts without and with steering by a module, show both, and check the ranks."""
    client = stage.client
    console = stage.report.console
    _heading(
        console,
        "Steering",
        f"a direction computed from captures, registered as a module, added at layer {LAYER}",
    )
    spec = {"layers": LAYER, "positions": "all_prompt", "tag": "direction"}
    source = client.run(
        model=MODEL_NAME, prompts=[*SEA, *LAND], capture=spec, sampling={"max_tokens": 0}
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
    sets = f"mean of {len(SEA)} texts about the sea − mean of {len(LAND)} others"
    _line(
        console,
        f"{sets}: norm {norm:.1f}, mean norm of the activations "
        f"{np.linalg.norm(means, axis=1).mean():.1f}",
    )
    module = client.modules.put(MODULE, {f"post_block.{LAYER}": direction}, MODEL_NAME, sets)
    push = [{"module": MODULE, "scale": SCALE}]
    use = f"a request uses {escape(to_json(push).decode())}"
    _line(console, f"registered as module {MODULE}, digest {module.digest[:DIGEST]}; {use}")

    def ask(steering: list[dict[str, Any]]) -> Answer:
        capture = {
            "layers": LAYER + 1,
            "positions": "all_prompt",
            "tag": "steered" if steering else "plain",
        }
        return client.completion(
            MODEL_NAME,
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
    console.print("\n", _receipts("Receipts of the steered completions", [steered]))
    yield graded(
        "texts", plain.texts == steered.texts, "the steered completions differ from the plain ones"
    )
    moved = _moved(client.capture(plain.job), client.capture(steered.job), direction / norm)
    pushed = SCALE * norm
    yield graded(
        "shift",
        moved < LEAST_SHIFT * pushed,
        (
            f"at layer {LAYER + 1} the stream moved {moved:.1f} along the direction (pushed by "
            f"{pushed:.1f})"
        ),
    )
    yield held(client, [steered], steered=True)
    console.print("\n  [dim]$ midstream get ranks[/]")
    result = client.global_steering.dynamic(MODEL_NAME)
    for worker in result.workers:
        _line(console, show_steering.worker_line(worker))
        console.print(show_steering.ranks(worker, result.determinism))
    yield graded(
        "ranks",
        not result.determinism.consistent,
        Text.from_markup(show_steering.agreement_line(result)).plain,
    )


def _patch(stage: DemoStage) -> Iterator[CheckFinding]:
    """Trace the fact that the tower is in Paris (Meng et al. 2022, arXiv:2202.05262), and draw the
    result in the terminal and as a figure.
    """
    console = stage.report.console
    _heading(
        console,
        "Patching",
        "rows of one prompt copied into another, to find where the answer is computed",
    )
    study = PatchStudy(CLEAN, CORRUPT, ANSWER, FOIL, client=stage.client, model=MODEL_NAME)
    study = study.sweep(hooks=[HOOK])
    result = study.result
    (pair,) = study.result.pairs
    console.print(Padding(study.report(count=3), (0, 0, 0, 2)))
    summary = result.summary
    grid = study.grid()
    path = stage.folder / "sweep.png"
    study.plot(path)
    _line(console, f"[bold]{escape(_short(path))}[/]: the same heatmap as a figure")
    took = f" in {summary.seconds:.1f} s" if summary.seconds else ""
    yield graded(
        "cells",
        summary.cells + summary.skipped != summary.total,
        f"{summary.cells} cells, each confirmed by every rank{took}; {summary.skipped} skipped",
    )
    knows = [
        item is not None and item.value * sign > 0
        for item, sign in ((pair.source, 1), (pair.base, -1))
    ]
    yield graded(
        "prompts",
        not all(knows),
        "unpatched, the model answers Paris for one prompt and Rome for the other",
    )
    values = np.nan_to_num(grid.values[grid.hooks[0]])
    yield graded(
        "last token",
        values[-1, -1] < LEAST_AT_THE_END,
        f"the last token in the last layer recovers {values[-1, -1]:.0%}",
    )
    layer, column = np.unravel_index(values[:, :-1].argmax(), values[:, :-1].shape)
    value = values[layer, column]
    late = values[-1, column]
    yield graded(
        "subject",
        value < LEAST_AT_THE_SUBJECT or late > MOST_WHEN_READ,
        (
            f"earlier, at the subject: “{grid.names[column]}” alone recovers {value:.0%} in "
            f"layer {layer}, {late:.0%} in the last"
        ),
    )
    floor = pair.noise_floor
    yield graded(
        "noise floor",
        floor is None or floor >= value,
        f"noise floor, from patches of a prompt with its own rows: {floor or 0:.2g}",
    )


#: What the demo shows and checks, in this order; see `stack.checks.table`.
DEMONSTRATED = (
    Check(("demo",), "patching", _patch),
    Check(("demo",), "capture", _capture),
    Check(("demo",), "steering", _steer),
)


def _moved(plain: CaptureReader, steered: CaptureReader, unit: np.ndarray) -> float:
    """Return the mean projection of (steered − plain) on a direction, over the prompt tokens after
    the sink.
    """
    moved = [
        (steered.array(LAYER + 1, request=request) - plain.array(LAYER + 1, request=request))[
            SINK_TOKENS:
        ]
        @ unit
        for request in plain.requests()
    ]
    return float(np.concatenate(moved).mean())


def _all(calls: list[Callable[[], Answer]], title: str, console: Console) -> list[Answer]:
    """Make calls concurrently; return their results in order."""
    with console.status(title), ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(lambda call: call(), calls))


def _receipts(title: str, answers: list[Answer]) -> RenderableType:
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
            f"{command} get capture {arguments} --set layer={LAYER}",
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
            "--hooks attn_out,mlp_out --figure sweep.png",
            "find the layers whose attention moves the answer to the last token",
        ),
    )
    for line, why in tries:
        _line(console, f"  [dim]# {why}[/]")
        _line(console, f"  [bold]{escape(line)}[/]")
    console.print()


def _store_of(settings: Settings, job: str) -> tuple[str, str]:
    """Return the artifact store, and the arguments of `get capture` for the job."""
    store = settings.artifacts
    if "://" in store:
        return store, f"{shlex.quote(store)} --set job={job}"
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
