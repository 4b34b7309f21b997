"""Checks of a service and findings: what was found, how bad it is, and what to do about it.

The measurements of `midstream doctor --deep` use `Rig` (both servers, and requests); what they must
show stands in `PROMISES`.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import httpx2
import msgspec
import numpy as np

from ....schemas.base import MidstreamError, Translated, __version__
from ....schemas.jobs.certificates import Certificate
from ....schemas.jobs.jobs import JobView
from ....schemas.settings.settings import Settings
from ...sdk import wire
from ...sdk.client import Client
from ..processes import wait_for
from ..supervisor import Announce, Supervisor


@dataclass
class Service:
    """The settings and addresses of a service's parts."""

    settings: Settings
    redis_url: str  # empty: not configured
    url: str
    redis_answers: bool = False  # as its check has found, also to writes

    def get(self, path: str, *, keyed: bool = True) -> httpx2.Response:
        """Call the API, with the settings' key if `keyed`. Raises MidstreamError if there is no
        answer.
        """
        headers = wire.headers(self.settings.api_key) if keyed else {}
        with Translated(
            httpx2.HTTPError,
            lambda error: MidstreamError("unavailable", f"no answer from {self.url}: {error}"),
        ):
            return httpx2.get(f"{self.url}{path}", headers=headers, timeout=TIMEOUT_S)

    @cached_property
    def missing(self) -> list[str]:
        """What the API lacks to run a job. Raises MidstreamError if there is no answer."""
        ready = self.get("/readyz")
        if ready.status_code == 200:
            return []
        return ready.json().get("missing") or [f"/readyz answers {ready.status_code}"]

    @property
    def without_redis(self) -> bool:
        """Whether the API lacks Redis, which does not answer here either, or takes no writes."""
        return not self.redis_answers and any(what.startswith("redis") for what in self.missing)


#: `info`: a fact that no check judges.
Level = Literal["info", "ok", "warn", "fail"]
#: See `table`.
Depth = Literal["plan", "quick", "deep", "demo", "end"]

#: Differences of two clocks in seconds: above the first, leases and deadlines are noticeably wrong;
#: above the second, they are useless.
SKEW_WARN_S = 0.5
SKEW_FAIL_S = 5.0
TIMEOUT_S = 5.0


class CheckFinding(msgspec.Struct, frozen=True):
    """One line of `midstream doctor` and `demo`."""

    level: Level
    about: str
    found: str
    advice: str = ""  # what to do about it
    # of a measured promise: one, or one for each pair; of a plan: the numbers in the text
    figures: list[float] = []
    limit: float | None = None  # of the figures' median


class Check(NamedTuple):
    """A row of the table of checks."""

    depths: tuple[Depth, ...]
    about: str  # of its findings; several are separated by commas
    take: Callable[[Any], Iterable[CheckFinding]]
    advice: str = ""  # if it cannot be taken


def findings_of(
    checks: Iterable[Check], subject: Any, say: Callable[[str], None] = lambda line: None
) -> Iterator[CheckFinding]:
    """Take checks of a subject in turn. One that raises fails, with the error as its reason."""
    for check in checks:
        say(f"checking: {check.about}")
        try:
            yield from check.take(subject)
        except Exception as error:  # the other checks still find what they can
            ours = type(error).__module__.startswith("midstream")
            why = str(error) if ours else f"{type(error).__name__}: {error}"
            for about in check.about.split(", "):
                yield CheckFinding("fail", about, why, check.advice)


def graded(
    about: str, value: float, found: str, advice: str = "", warn: float = 1, fail: float = 1
) -> CheckFinding:
    """Judge a value, or what is wrong: from `fail` on it fails, from `warn` on it is worth a
    warning, and else needs no advice.
    """
    level: Level = "ok"
    if value >= fail:
        level = "fail"
    elif value >= warn:
        level = "warn"
    return CheckFinding(level, about, found, "" if level == "ok" else advice)


def timed(times: int, call: Callable[[], object]) -> tuple[float, str]:
    """Call repeatedly; return the median of the milliseconds, and a text with the maximum."""
    took = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        took.append((time.perf_counter() - began) * 1000)
    middle = statistics.median(took)
    return middle, f"median {middle:.2f} ms, maximum {max(took):.2f} ms in {times}"


def clock_finding(about: str, ahead: float, warn: float = SKEW_WARN_S) -> CheckFinding:
    """Judge a clock that is `ahead` seconds ahead of this machine's. `warn`: tolerated seconds."""
    text = f"{abs(ahead):.2f} s {'ahead of' if ahead > 0 else 'behind'} this machine's"
    advice = "leases and deadlines depend on clocks: run NTP on both machines"
    return graded(about, abs(ahead), text, advice, warn, SKEW_FAIL_S)


def version_finding(about: str, version: str, more: str = "") -> CheckFinding:
    """Judge the version of another process by this command's."""
    text = f"version {version}{' ' + more if more else ''}"
    if version == __version__:
        return CheckFinding("ok", about, text)
    text += f"; this command's version is {__version__}"
    return CheckFinding(
        "warn", about, text, "run one version everywhere: see the notes on upgrades"
    )


#: Prompts of a call, and their tokens.
BATCH = 32
LENGTH = 48
#: Tokens that a request generates whose rows or receipts are looked at.
OWN_TOKENS = 4
HTTP_S = 600.0
#: Every layer at one hook.
LAYERS = {"layers": "all", "hook": "post_block"}
EVERY_ROW = {**LAYERS, "positions": "all_prompt"}
#: Standard deviation of a steering vector's elements: small where only time is measured, large
#: where an edit that reaches a neighbour must be seen.
GENTLE = 0.01
STRONG = 4.0


@dataclass
class Rig:
    """Both servers, and requests to Midstream."""

    settings: Settings  # of both servers
    stack: Supervisor
    client: Client
    stock: str  # address of stock vLLM's server
    seconds: float  # for the timed pairs
    killed: Sequence[str]  # the processes to kill
    say: Announce
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))

    @cached_property
    def card(self) -> dict[str, Any]:
        """The model as the service describes it."""
        return self.client.model(self.settings.served_model)

    @property
    def certificate(self) -> Certificate | None:
        return msgspec.convert(self.card.get("certificate"), Certificate | None, strict=False)

    def prompts(self, count: int, length: int = LENGTH) -> list[list[int]]:
        """Return random prompts, without the special tokens at the ends of the vocabulary."""
        size = self.card["vocab_size"]
        return self.rng.integers(size // 8, size // 2, size=(count, length)).tolist()

    def steering(self, size: float) -> list[dict[str, Any]]:
        """Return steering of every token in every layer by a random vector."""
        vector = size * self.rng.standard_normal(self.card["hidden_size"])
        return [{**LAYERS, "positions": "all", "vector": vector.astype(np.float32)}]

    def submit(self, prompts: list[list[int]], tokens: int, **fields: Any) -> JobView:
        sampling = {"max_tokens": tokens, "ignore_eos": True}
        return self.client.submit(
            model=self.card["id"], prompts=prompts, sampling=sampling, **fields
        )

    def await_start(self, job: str) -> None:
        wait_for(lambda: self.client.jobs.get(job).state != "queued", HTTP_S)

    def rows(self, prompts: list[list[int]], **fields: Any) -> tuple[np.ndarray, int]:
        """Capture prompts; return the rows of the first, and the engine step in which its request
        ended.
        """
        job = self.submit(prompts, OWN_TOKENS, capture=EVERY_ROW, **fields).id
        self.client.wait(job, HTTP_S)
        with self.client.capture(job) as reader:
            return reader.stack(), self.step(job)

    def step(self, job: str) -> int:
        """Return the engine step in which a job's first request ended."""
        determinism = self.client.result(job).determinism
        if determinism is None:
            raise MidstreamError("internal", f"job {job} has no receipts")
        return determinism.stages[0].ranks[0].step


#: Percentiles of the bootstrapped median that bound a figure's interval, and the number of draws.
INTERVAL = (2.5, 97.5)
DRAWS = 2000


class Promise(NamedTuple):
    """One promise: it holds if the measured figure is at most `limit`."""

    text: str
    limit: float
    unit: str = ""


#: In the order of the page. Costs are whole calls over HTTP, relative to those of stock vLLM's own
#: server; docs/capacity.md has the reasons for the limits.
PROMISES = {
    "certificate": Promise("laws of the hook points that fail on the loaded model", 0),
    "idle": Promise("cost of a call that captures and edits nothing", 1.05, "×"),
    "capture": Promise("cost of capturing a hook in every layer, at every prompt token", 1.10, "×"),
    "steer": Promise("cost of steering every token in every layer", 1.10, "×"),
    "patch": Promise("cost of patching a prompt token in every layer", 1.10, "×"),
    "neighbour": Promise("rows beside a steered request that differ from those without it", 0),
    "noise": Promise("difference of a row alone and in a batch, relative to its norm", 1e-3),
    "receipts": Promise("files and receipts missing or wrong when a held response arrives", 0),
    "durability": Promise("accepted jobs lost when a process is killed", 0),
    "processes": Promise("processes left behind at the end", 0),
}


def judge(
    name: str, figures: Sequence[float], detail: str, limit: float | None = None
) -> CheckFinding:
    """Judge a promise by its figures: one, or one for each pair. It fails if their median and the
    median's whole interval are above the limit, or if a figure is missing or not a number; if only
    the median is above it, the measurement cannot decide.

    `limit` replaces the promise's.
    """
    text, most, unit = PROMISES[name]
    most = most if limit is None else limit
    measured = [float(figure) for figure in figures]
    bound = f"at most {_number(most)}{unit}: {text}\n{detail}"
    if not measured or not all(map(math.isfinite, measured)):
        return CheckFinding("fail", name, f"not measured, {bound}", "", measured, most)
    figure = float(np.median(measured))
    low, high = interval(measured)
    spread = f" [{_number(low)}, {_number(high)}]" if len(measured) > 1 else ""
    level: Level = "fail"
    if figure <= most:
        level = "ok"
    elif low <= most:
        level = "warn"
    advice = "not decided: measure longer (--seconds)" if level == "warn" else ""
    return CheckFinding(
        level, name, f"{_number(figure)}{unit}{spread}, {bound}", advice, measured, most
    )


def interval(figures: Sequence[float]) -> tuple[float, float]:
    """Return the interval of the median, by bootstrap."""
    draws = np.random.default_rng(0).integers(len(figures), size=(DRAWS, len(figures)))
    low, high = np.percentile(np.median(np.array(figures)[draws], axis=1), INTERVAL)
    return float(low), float(high)


def _number(value: float) -> str:
    return f"{value:.0f}" if value == int(value) and value != 1 else f"{value:.3g}"
