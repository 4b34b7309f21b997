"""How far are captured rows, plain and edited, from transformers' rows: for every architecture,
hook, runner, mode and dtype?

    make fidelity            # all of it, tens of minutes; writes docs/reference/fidelity.md

The engine captures every hook of every layer of a batch of requests: one plain, and one for each
hook with two edits there, an addition in layer 1 and a replacement in layer 2. All rows of all of
them, edited, downstream of an edit or neither, are compared with transformers on the same
checkpoint and the same tokens. A part of this runs in `test_fidelity.py`.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from families import BF16_ONLY, CHANGED, FAMILIES, ROUTED as ROUTED_FAMILIES, checkpoint
from fidelity_page import PAGE, WAYS, Figure, Table, Way, read_page, write_page
from host import Host, prompt_of
from nursery import Nursery
from reference import Edit, Reference
from tiny import CHECKPOINTS, HIDDEN, LAYERS
from tolerances import BF16_EXCESS

from midstream.schemas.jobs.jobs import Job
from midstream.schemas.prompts.selectors import HOOKS
from midstream.schemas.requests.specs import StoredCapture

TRITON_CPU = Path(__file__).resolve().parents[2] / "tests" / "engine" / "triton_cpu"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ALL = list(range(LAYERS))
PROMPT = 40
ADD_LAYER = 1
ADDED = [2, 5]
REPLACE_LAYER = 2
REPLACED = [3, PROMPT - 1]
#: In bf16 an early token near a router's tie may take other experts, and every later token attends
#: to it: where a router chooses, the trials are made with so many prompts, and the median of their
#: figures counts.
ROUTED = {"mixtral", "qwen3-moe", *ROUTED_FAMILIES}
DRAWS = 5
#: There, one generated token in so many may be another than transformers' (measured: 2 of 140).
OTHER_TOKENS = 20


Rows = Mapping[tuple[str, int], np.ndarray]


class Truth:
    """transformers on a checkpoint, in fp32 and, for bf16, also in bf16."""

    def __init__(self, path: Path, dtype: str, reference: Callable[..., Reference] = Reference):
        self._truth = reference(path)
        self._rounded = reference(path, DTYPES[dtype]) if dtype != "float32" else None
        self._distance = _of_median if self._truth.has_router else _of_all
        self.hooks = self._truth.hooks
        self.has_router = self._truth.has_router
        # generated; of those that transformers does not give the best score, with the same edits
        self._tokens = self._others = 0

    def errors(self, got: Rows, tokens: list[int], edits: Sequence[Edit] = ()) -> dict[str, float]:
        """Hook → error of the rows, see `Figure`. Rows of the first layers may be missing."""
        hooks = {hook for hook, _ in got}
        lowest = min(layer for _, layer in got)
        wanted = {
            place: rows
            for place, rows in self._truth.rows(tokens, edits).items()
            if place[0] in hooks and place[1] >= lowest
        }
        assert got.keys() == wanted.keys()
        if self._rounded is None:
            self._count(tokens)
            return {hook: float(_relative(got, wanted, hook).max()) for hook in hooks}
        rounded = self._rounded.rows(tokens, edits)
        self._count(tokens)
        rounded = {place: rounded[place] for place in wanted}
        return {
            hook: self._distance(got, wanted, hook) / self._distance(rounded, wanted, hook)
            for hook in hooks
        }

    def _count(self, tokens: list[int]) -> None:
        """Of the last run.

        In bf16 a score may be as far from the best as two of them are by rounding.
        """
        scores = self._truth.logits[PROMPT - 1 : -1]
        chosen = np.array(tokens[PROMPT:], dtype=int)
        rounding = (
            0.0
            if self._rounded is None
            else np.abs(self._rounded.logits[PROMPT - 1 : -1] - scores).max(-1)
        )
        self._tokens += len(chosen)
        self._others += int(
            (
                scores.max(-1) - scores[np.arange(len(chosen)), chosen] > 2 * BF16_EXCESS * rounding
            ).sum()
        )

    @property
    def other_tokens(self) -> int:
        """More than there may be, see `OTHER_TOKENS`."""
        return max(
            0,
            self._others
            - (
                self._tokens // OTHER_TOKENS if self._rounded is not None and self.has_router else 0
            ),
        )


def _stack(rows: Rows, hook: str) -> np.ndarray:
    """`[layers × tokens, hidden]`"""
    return np.concatenate([rows[place] for place in sorted(rows) if place[0] == hook])


def _relative(rows: Rows, wanted: Rows, hook: str) -> np.ndarray:
    """Each row's error, relative to the row's length."""
    right = _stack(wanted, hook)
    return np.linalg.norm(_stack(rows, hook) - right, axis=-1) / np.linalg.norm(right, axis=-1)


def _of_median(rows: Rows, wanted: Rows, hook: str) -> float:
    return float(np.median(_relative(rows, wanted, hook)))


def _of_all(rows: Rows, wanted: Rows, hook: str) -> float:
    return float(np.linalg.norm(_stack(rows, hook) - _stack(wanted, hook)))


@dataclass(frozen=True)
class Trial:
    """A request with edits at one hook, or at none."""

    hook: str
    job: Job
    edits: list[Edit]


@dataclass(frozen=True)
class Outcome:
    """What was captured of a trial."""

    edits: list[Edit]
    token_ids: list[int]
    rows: Rows  # before the edits of the same place
    replaced: np.ndarray | None  # the rows that are replaced, after it: `[positions, hidden]`


def trials(host: Host, hooks: Iterable[str], draw: int) -> Iterator[Trial]:
    """One without edits, and for each hook one with an addition at two positions and a replacement
    at two others.

    `draw`: each has other prompts.
    """
    first = 1 + 100 * draw
    everything = StoredCapture(sites={hook: ALL for hook in hooks}, positions="all", tag="before")
    yield Trial("", host.job(prompt_of(PROMPT, seed=first), max_tokens=3, capture=everything), [])
    for number, hook in enumerate(hooks):
        added, put = 4 * np.random.default_rng(number).normal(size=(2, HIDDEN)).astype(np.float32)
        edits = [
            Edit(ADD_LAYER, added, ADDED, hook),
            Edit(REPLACE_LAYER, put, REPLACED, hook, "replace"),
        ]
        after = StoredCapture(
            sites={hook: [REPLACE_LAYER]}, positions=REPLACED, tag="after", at="after"
        )
        job = host.job(
            prompt_of(PROMPT, seed=first + 1 + number),
            max_tokens=3,
            capture=[everything, after],
            steering=host.steering(*edits),
        )
        yield Trial(hook, job, edits)


def capture(host: Host, hooks: tuple[str, ...], draw: int = 0) -> dict[str, Outcome]:
    """Run all trials in one batch; hook of the edits, or "" for the plain one → outcome."""
    asked = list(trials(host, hooks, draw))
    host.run(*(trial.job for trial in asked))
    outcomes = {}
    for trial in asked:
        reader = host.capture(trial.job)
        rows = {(hook, layer): reader.array(layer, hook) for hook in hooks for layer in ALL}
        replaced = (
            host.capture(trial.job, 1).array(REPLACE_LAYER, trial.hook) if trial.hook else None
        )
        outcomes[trial.hook] = Outcome(trial.edits, reader.token_ids(), rows, replaced)
    return outcomes


def judge(draws: Sequence[Mapping[str, Outcome]], truth: Truth, dtype: str) -> dict[str, Figure]:
    """Hook → figure, the median over the draws.

    Raises AssertionError when a replaced row is not, bit for bit, what replaces it.
    """
    found = [_judge(outcomes, truth, dtype) for outcomes in draws]
    return {
        hook: Figure(
            *(
                float(np.median([getattr(figures[hook], name) for figures in found]))
                for name in ("rows", "edits")
            )
        )
        for hook in found[0]
    }


def _judge(outcomes: Mapping[str, Outcome], truth: Truth, dtype: str) -> dict[str, Figure]:
    errors = {
        hook: truth.errors(outcome.rows, outcome.token_ids, outcome.edits)
        for hook, outcome in outcomes.items()
    }
    for hook, outcome in outcomes.items():
        if hook:
            put = np.stack(
                [
                    edit.vector
                    for edit in outcome.edits
                    if edit.op == "replace"
                    for _ in edit.positions
                ]
            )
            vectors = torch.from_numpy(put).to(DTYPES[dtype]).float().numpy()
            assert (outcome.replaced == vectors).all(), f"{hook}: a replaced row is not the vector"
    return {
        hook: Figure(errors[""][hook], max(errors[hook].values()))
        for hook in HOOKS
        if hook in errors[""]
    }


def options_of(way: Way) -> dict[str, object]:
    """Settings of an engine for one checkpoint."""
    return {
        "engine.dtype": way.dtype,
        "runner": way.runner,
        "engine.enforce_eager": way.mode == "eager",
        "engine.max_model_len": 128,
        "engine.max_num_batched_tokens": 512,
        "engine.max_num_seqs": 8,
        "kv_cache_gib": 0.125,
        "tuning.capture_buffer_mib": 16,
        "engine.enable_prefix_caching": False,
    }


def nursery_for(runner: str, directory: Path) -> Nursery:
    """Forks of one process run one runner: v2 needs Triton's interpreter from the first import."""
    directory.mkdir(parents=True, exist_ok=True)
    if runner == "v1":
        return Nursery(directory)
    path = os.pathsep.join([str(TRITON_CPU), *filter(None, [os.environ.get("PYTHONPATH")])])
    return Nursery(directory, {"PYTHONPATH": path, "TRITON_INTERPRET": "1"})


def run(
    nursery: Nursery, directory: Path, name: str, path: Path, way: Way
) -> list[dict[str, Outcome]]:
    """All trials of checkpoint `name`, which lies at `path`, in one way."""
    # of which chunks of attention are a multiple
    blocks = {"engine.block_size": 32} if name in FAMILIES else {}
    host = nursery.host(
        directory / f"{name} {way.name}".replace(" ", "-"),
        path,
        CHANGED.get(name),
        **options_of(way),
        **blocks,
    )
    try:
        assert host.info["runner"] == way.runner
        draws = DRAWS if name in ROUTED and way.dtype == "bfloat16" else 1
        return [capture(host, host.info["hooks"], draw) for draw in range(draws)]
    finally:
        host.close()


def ways_of(name: str) -> Iterator[Way]:
    """The ways in which checkpoint `name` is measured; families in one of both dtypes, as far as
    vLLM computes them.
    """
    for way in WAYS:
        plain = (way.runner, way.mode) == ("v1", "eager") and (
            name not in BF16_ONLY or way.dtype == "bfloat16"
        )
        if name not in FAMILIES or plain:
            yield way


def main(names: Sequence[str]) -> None:
    """Measure the named checkpoints in every way, or all of them; other rows of the page stay."""
    page = PAGE.read_text()
    table: Table = read_page(page) if names else {}
    exceeded = []
    with tempfile.TemporaryDirectory() as folder:
        for runner in sorted({way.runner for way in WAYS}):
            with nursery_for(runner, Path(folder) / runner) as nursery:
                for name in names or [*CHECKPOINTS, *FAMILIES]:
                    path = checkpoint(name, Path(folder) / "checkpoints" / name)
                    for way in (way for way in ways_of(name) if way.runner == runner):
                        started = time.monotonic()
                        outcomes = run(nursery, Path(folder) / runner, name, path, way)
                        for hook, figure in judge(
                            outcomes, Truth(path, way.dtype), way.dtype
                        ).items():
                            table.setdefault((name, hook), {})[way.name] = str(figure)
                            if figure.worst > way.tolerance:
                                exceeded.append(
                                    f"{name} {hook} {way.name}: {figure}, tolerance {way.tolerance}"
                                )
                        worst = {
                            hook: table[name, hook][way.name]
                            for hook in HOOKS
                            if (name, hook) in table
                        }
                        print(
                            f"{name}, {way.name}: {worst}, {time.monotonic() - started:.1f} s",
                            flush=True,
                        )
                        PAGE.write_text(write_page(PAGE.read_text(), table))
    if exceeded:
        sys.exit("beyond their tolerance:\n" + "\n".join(exceeded))


if __name__ == "__main__":
    main(sys.argv[1:])
