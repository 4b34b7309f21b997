"""What a rank does in each step in which all requests decode: Python calls of ours on the model's
thread, whether another thread runs, and the work that is queued on the forward's stream. And in a
step in which one request ends and another begins: nothing for those that stay.
"""

import gc
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from late_device import KIND, Device
from line_kit import python_lines
from lora_kit import ADAPTER, holding_adapter
from rank_kit import plane_config, view_of
from wait_kit import warn_if_late

from midstream import __version__
from midstream.schemas.artifacts.probes import ProbeAction, ProbeContent, StoredProbe
from midstream.schemas.base.tensors import Tensor, content_hash, from_numpy
from midstream.schemas.prompts.selectors import Span
from midstream.schemas.prompts.windows import Trigger
from midstream.schemas.requests.specs import (
    RankSpec,
    StoredCapture,
    StoredSteering,
    occurrences,
    probe_captures,
    steering_digest,
    steering_rows,
    with_columns,
)
from midstream.workers.runner.base.config import RankPlace
from midstream.workers.runner.base.engine_step import Finish, NewRequest
from midstream.workers.runner.hooks.sites import RankSite, Sizes, buffers_of
from midstream.workers.runner.plane.data_plane import DataPlane

LAYERS = 32
HIDDEN = 4
PROMPT = 2
MOST = 256
STEPS = 48
DTYPE = torch.float32

#: Kind of load → our calls in a step on the model's thread, as many with 64 requests as with 256.
#: They may only fall: whoever saves calls writes down what is left.
CALLS = {
    **{"idle": 13, "one": 47, "steer": 38, "both": 49, "lora": 44},
    # probes gate the steering of one request, of all requests, of each request one of its own; and
    # may stop all requests
    **{"gated": 57, "gated all": 57, "gated own": 64, "stopped all": 57},
    # tokens decide the steering of all requests; a graph is chosen for each step
    **{"triggered all": 46, "families": 38},
}
_MIDDLE = slice(LAYERS // 2, LAYERS // 2 + 1)
#: Kind of request → the layers whose rows it captures, and the other fields of the capture.
CAPTURED: dict[str, tuple[slice, dict[str, Any]]] = {
    "one": (_MIDDLE, {"positions": "all"}),
    "both": (slice(None), {"positions": "all"}),
    "window": (_MIDDLE, {"positions": "all", "window": Span(last=4)}),
    "prompt": (_MIDDLE, {"positions": "all_prompt"}),
    **{f"sites {at}": (slice(at, None, 4), {"positions": "all"}) for at in (0, 1)},
}
#: Kinds of mixed requests, in turn; the first two have a condition.
MIXED = ("triggered all", "gated own", "limit", "both", "window", "prompt", "sites 0", "sites 1")
#: Lines for each request with a condition, in a step in which any request begins or ends. They may
#: only fall.
CONDITION_LINES = 24
#: Kinds that are parts of others here, or cost what another does.
PARTS = {"one", "steer", "gated", "stopped all"}
#: Kind of load → operations that a step queues on the forward's stream beside the forward.
QUEUED = {
    **dict.fromkeys(CALLS, 2),
    **dict.fromkeys(["idle", "steer", "lora", "triggered all", "families"], 0),
}
#: Of a probe, whose score is its bias.
WEIGHTS = [from_numpy(np.zeros((1, HIDDEN), dtype=np.float32)), from_numpy(np.ones(1, np.float32))]
#: Tokens of a prompt, all of which are 1 as all that follow, and a trigger that each one opens.
PROMPT_IDS = [1] * PROMPT
TRIGGER = Trigger(token_ids=[[1, 1], [2]])
#: Folders of the product whose functions are counted.
OURS = tuple(f"/{folder}/" for folder in ("workers", "kernels", "schemas", "broker", "storage"))


def probe(
    action: ProbeAction, threshold: float, weights: Sequence[Tensor] = tuple(WEIGHTS)
) -> StoredProbe:
    content = ProbeContent(
        hook="post_block",
        layer=LAYERS // 2,
        tensors=list(map(content_hash, weights)),
        labels=["x"],
        thresholds=[threshold],
    )
    return StoredProbe(name="p", digest=content.digest, content=content, actions=[action])


class Load:
    """A rank whose requests decode, on a device that keeps up with it."""

    def __init__(self, kind: str, requests: int, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._kind = kind
        self._at: dict[str, int] = {}  # request → position of its next row
        self._begun = requests
        self.calls = 0
        self.queued = 0
        self.counted = False
        self.device = Device(0, haste=0.99)
        self.device.install(patch)
        with self.device.calls():
            self._make(folder)
            self.plane.rank_state.vectors.put({content_hash(each): each for each in WEIGHTS})
            new = [self._new(number) for number in range(requests)]
            if kind == "idle":
                self._at = {each.id: 0 for each in new}
                new = []
            self._step(new)
            for _ in range(3):  # one is planned, the next is found to repeat it
                self._step()

    def _make(self, folder: Path) -> None:
        sites = [RankSite("post_block", layer, "pair") for layer in range(LAYERS)]
        rows = MOST * PROMPT
        sizes = Sizes(
            ring_rows=2 * LAYERS * rows,
            capacity=rows,
            lists=(2 * LAYERS + 1) * rows,
            patterns=8,
            configurations=MOST + 1,
            entries=LAYERS * MOST + 1,
        )
        self._buffers = buffers_of(LAYERS, sizes, HIDDEN, DTYPE, KIND)
        self._hidden = self.device.full((rows, HIDDEN), 0.0, DTYPE)
        self._inputs = torch.ones(rows, dtype=torch.int32)
        config = plane_config(
            folder,
            steering_rows=sizes.configurations,
            steering_entries=sizes.entries,
            step_tokens=rows,
            capture_queue_mib=64,
            row_store_mib=0,
            graph_families=self._kind == "families",
        )
        self.plane = DataPlane(
            config,
            RankPlace(rank=0, world=1, tp=0, pp=0, stages=1),
            sites,
            self._buffers,
            num_layers=LAYERS,
            traced=True,
            loras=holding_adapter(rows)[0] if self._kind == "lora" else None,
        )

    def _new(self, number: int) -> NewRequest:
        """A request with a configuration of its own."""
        layers = list(range(LAYERS))
        captures = []
        steering = []
        probes = []
        kind = MIXED[number % len(MIXED)] if self._kind == "mixed" else self._kind
        if kind in ("gated all", "stopped all") or (kind == "gated" and not number):
            probes = [probe("stop", 2.0) if kind == "stopped all" else probe("steer", 0.5)]
        if kind == "gated own":
            own = [from_numpy(np.full((1, HIDDEN), number, dtype=np.float32)), WEIGHTS[1]]
            self.plane.rank_state.vectors.put({content_hash(each): each for each in own})
            probes = [probe("steer", 0.5 + number / MOST / 8, own)]
        if kind in CAPTURED:
            at, fields = CAPTURED[kind]
            captures = [StoredCapture(sites={"post_block": layers[at]}, tag="t", **fields)]
        if kind not in {"idle", *CAPTURED} or kind == "both":
            vector = from_numpy(np.full(HIDDEN, number, dtype=np.float32))
            self.plane.rank_state.vectors.put({content_hash(vector): vector})
            steering = [
                StoredSteering(
                    layers=layers,
                    hook="post_block",
                    positions="all",
                    family="add",
                    tensors=[content_hash(vector)],
                    gate="".join(one.name for one in probes if "steer" in one.actions),
                    trigger=TRIGGER if kind == "triggered all" else msgspec.UNSET,
                    limit=0.5 if kind == "limit" else 0.0,
                )
            ]
        spec = RankSpec(
            version=__version__,
            job=f"j{number}",
            request=0,
            attempt=1,
            prompt_tokens=PROMPT,
            captures=[*captures, *probe_captures(probes)],
            rows=with_columns(steering_rows(steering)),
            occurrences=occurrences(steering, PROMPT_IDS),
            digest=steering_digest(steering) if steering else "",
            probes=probes,
            lora=ADAPTER if self._kind == "lora" else None,
        )
        return NewRequest(f"r{number}", spec, 0, PROMPT + STEPS + 8, token_ids=PROMPT_IDS)

    @contextmanager
    def _counting(self) -> Iterator[None]:
        def note(frame: FrameType, event: str, _: object) -> None:
            file = frame.f_code.co_filename
            if event == "call" and "/tests/" not in file and any(map(file.__contains__, OURS)):
                self.calls += 1

        sys.setprofile(note if self.counted else None)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _step(
        self, new: Sequence[NewRequest] = (), ended: Mapping[str, Finish] = MappingProxyType({})
    ) -> None:
        for each in ended:
            del self._at[each]
        self._at |= {each.id: 0 for each in new}
        windows = [(each, at, 1 if at else PROMPT) for each, at in self._at.items()]
        self._at = {each: at + count for each, at, count in windows}
        rows = sum(count for *_, count in windows)
        plane = self.plane
        first = self.device.first
        before = first.issued
        with self._counting():
            plane.begin(list(new), dict(ended), 0)
            plane.choose(windows)
            plane.plan(view_of(*windows, inputs=self._inputs))
        self.queued += first.issued - before
        due = plane.banks.first.planner.due
        buffers = self._buffers
        if due is not None:
            edited = np.flatnonzero(due.counts[:, 0])
            counts = buffers.counts.content
            sizes = buffers.sizes.content

            def forward() -> None:
                counts.add_(torch.from_numpy(due.counts))
                sizes[edited, :rows] = 0.1

            self.device.launch(forward)
        before = first.issued
        with self._counting():
            plane.drain(self._hidden)
            if (found := plane.banks.found()) is not None:
                found()
        self.queued += first.issued - before

    def turn(self) -> int:
        """Return how many of our lines run in a step before which a request ends and another
        begins.
        """
        gc.collect()
        first = next(iter(self._at))
        ended = Finish([1] * (self._at[first] + 1), aborted=False)
        new = self._new(self._begun)
        self._begun += 1
        with self.device.calls():
            return python_lines(lambda: self._step([new], {first: ended}))

    def count(self) -> tuple[int, int, float]:
        """Per step: calls on the model's thread, and operations that were queued on the forward's
        stream; and the seconds that other threads ran meanwhile.
        """
        gc.collect()  # finalisers of what earlier loads left would be counted
        self.queued = 0
        self.counted = True
        before = _others()
        with self.device.calls():
            for _ in range(STEPS):
                self._step()
            self.counted = False
            after = _others()
            requests = self.plane._requests
            assert not any(tracked.failure for tracked in requests.tracked.values())
            assert self._kind == "idle" or self.plane.banks.first.planner.repeats
        return round(self.calls / STEPS), round(self.queued / STEPS), after - before


@pytest.mark.slow("every line is counted: 320 requests begin")
@pytest.mark.parametrize("kind", ["one", "steer", "both"])
def test_a_request_that_begins_and_one_that_ends_cost_nothing_for_those_that_stay(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = []
    for requests in (64, MOST):
        load = Load(kind, requests, tmp_path / str(requests), monkeypatch)
        # in some steps rows of all requests come to a new block
        lines.append(min(load.turn() for _ in range(4)))
    print(f"{kind}: {lines} lines with 64 and {MOST} requests")
    few, many = lines
    assert many == few


@pytest.mark.slow("every line is counted: 112 requests begin")
def test_among_mixed_requests_it_costs_only_for_gates_and_triggers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = []
    for requests in (32, 64):
        load = Load("mixed", requests, tmp_path / str(requests), monkeypatch)
        lines.append([load.turn() for _ in MIXED])
    print(f"mixed: {lines} lines with 32 and 64 requests")
    few, many = lines
    (more,) = {after - before for before, after in zip(few, many, strict=True)}
    assert more <= CONDITION_LINES * (64 - 32) * 2 // len(MIXED)


def _others() -> float:
    """The seconds that the other Python threads of this process have run."""
    return sum(
        time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        for thread in threading.enumerate()
        if thread is not threading.current_thread() and thread.ident is not None
    )


@pytest.mark.slow("every call is counted: 320 requests begin, and 48 steps of 64 and of 256")
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.long) if kind in PARTS else kind for kind in CALLS],
)
def test_a_step_costs_calls_that_do_not_grow_with_the_requests(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for requests in (64, MOST):
        load = Load(kind, requests, tmp_path / str(requests), monkeypatch)
        calls, queued, others = load.count()
        print(f"{kind}, {requests} requests: calls {calls}, queued {queued}, others {others:.4f} s")
        assert calls <= CALLS[kind]
        assert queued <= QUEUED[kind]
        warn_if_late(others, 0.005, "helper threads take the interpreter lock from a GPU's thread")
