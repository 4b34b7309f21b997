"""The scorer of a rank: scores of a step's rows equal numpy's, whichever probes read them and
wherever the rows lie.
"""

import threading

import numpy as np
import pytest
import torch

from midstream.schemas.artifacts.probes import Action, ProbeContent, StoredProbe
from midstream.schemas.base.tensors import Tensor, content_hash, from_numpy
from midstream.schemas.requests.specs import RankSpec, probe_captures
from midstream.workers.runner.edits.steering_tables import VectorStore
from midstream.workers.runner.plane.probe_scores import _BYTES, _CHUNK, Scorer
from midstream.workers.runner.rows.capture import Recording
from midstream.workers.runner.rows.extents import Extent, StepRows
from midstream.workers.runner.rows.pending_rows import LANDED, Landing

HIDDEN, LAYERS = 16, 3
rng = np.random.default_rng(0)


class Weights:
    """Random ones, of `k` labels at a layer, kept in a store."""

    def __init__(
        self, vectors: VectorStore, layer: int, k: int, name: str, action: Action = "stop"
    ) -> None:
        self.weight, self.bias = (
            rng.normal(size=shape).astype(np.float32) for shape in ((k, HIDDEN), (k,))
        )
        tensors: list[Tensor] = [from_numpy(self.weight), from_numpy(self.bias)]
        for tensor in tensors:
            vectors.put(content_hash(tensor), tensor)
        content = ProbeContent(
            hook="post_block",
            layer=layer,
            tensors=[content_hash(tensor) for tensor in tensors],
            labels=[str(n) for n in range(k)],
            thresholds=[None] * k,
        )
        self.layer, self.probe = (
            layer,
            StoredProbe(name=name, digest=content.digest, content=content, action=action),
        )


def test_scores_of_a_step_equal_numpy() -> None:
    """Requests of two sets of probes, whose labels are not in the order of their layers; prompts
    among tokens that follow one another.
    """
    vectors = VectorStore()
    first = [
        Weights(vectors, layer, k, str(number))
        for number, (layer, k) in enumerate(((2, 1), (0, 3), (2, 2), (1, 1)))
    ]
    sets = [first, first[1:2]]
    scorer = Scorer(vectors, HIDDEN, waits=True)
    counts = [1, 4, 1, 1, 2, 1]
    slots = np.cumsum([0, *counts])
    total = int(slots[-1])
    slab = torch.randn(LAYERS * total, HIDDEN)
    # Rows of layer 1 come first: what one product reads does not lie in the order of its layers.
    order = {0: 1, 1: 0, 2: 2}
    base = np.repeat([order[layer] * total for layer in range(LAYERS)], 2)
    step = StepRows(slab, base, np.zeros(2 * LAYERS, dtype=np.int64), LANDED)
    extents, watches = [], []
    for number, count in enumerate(counts):
        probes = [each.probe for each in sets[number % 2]]
        (capture,) = probe_captures(probes)
        ports = {("post_block", layer): 2 * layer for layer in capture.sites["post_block"]}
        recording = Recording(
            capture, dict(ports), np.isin(np.arange(2 * LAYERS), list(ports.values())), 1
        )
        spec = RankSpec(
            version="", job=str(number), request=0, attempt=1, prompt_tokens=1, probes=probes
        )
        watches.append(scorer.watch(str(number), spec, [recording]))
        extents.append((recording, Extent(step, np.array([slots[number]]), 0, count)))
    scorer.take(extents, [])
    for number, (watch, count) in enumerate(zip(watches, counts, strict=True)):
        assert watch is not None
        wanted = []
        for each in sets[number % 2]:
            at = order[each.layer] * total + slots[number]
            wanted.append(slab[at : at + count].numpy() @ each.weight.T + each.bias)
        np.testing.assert_allclose(watch.scores[:count], np.concatenate(wanted, axis=1), atol=1e-5)
        assert (watch.reached, np.isnan(watch.scores[count:]).all()) == (count, True)


class Steps:
    """Requests with a probe each, at layer 0, and steps that compute rows of them."""

    def __init__(self, *actions: Action, streams: bool = False, waits: bool = True) -> None:
        self._vectors = VectorStore()
        self.scorer = Scorer(self._vectors, HIDDEN, waits=waits)
        self.weights = [
            Weights(self._vectors, 0, 2, str(number), action)
            for number, action in enumerate(actions)
        ]
        # of each request: position → its row as it was last
        self.rows: list[dict[int, np.ndarray]] = [{} for _ in actions]
        self.recordings, self.watches = [], []
        for number, each in enumerate(self.weights):
            (capture,) = probe_captures([each.probe])
            self.recordings.append(
                Recording(capture, {("post_block", 0): 0}, np.array([True, False]), 1)
            )
            spec = RankSpec(
                version="",
                job="",
                request=0,
                attempt=1,
                prompt_tokens=1,
                probes=[each.probe],
                stream_scores=streams,
            )
            watch = self.scorer.watch(str(number), spec, [self.recordings[-1]])
            assert watch is not None
            self.watches.append(watch)

    def take(
        self, *windows: tuple[int, int, int], unused: int = 0, landing: Landing = LANDED
    ) -> None:
        """(request, first position, how many) of one step, whose slab has so many rows that no
        probe reads.
        """
        slab = torch.randn(sum(count for _, _, count in windows) + unused, HIDDEN)
        step = StepRows(slab, np.zeros(2, dtype=np.int64), np.zeros(2, dtype=np.int64), landing)
        items, at = [], 0
        for request, first, count in windows:
            self.rows[request] |= {first + n: slab[at + n].numpy() for n in range(count)}
            items.append((self.recordings[request], Extent(step, np.array([at]), first, count)))
            at += count
        self.scorer.take(items, [])

    def assert_scored(self, request: int, positions: int) -> None:
        watch, weights = self.watches[request], self.weights[request]
        wanted = (
            np.stack([self.rows[request][position] for position in range(positions)])
            @ weights.weight.T
            + weights.bias
        )
        assert watch.reached == positions
        np.testing.assert_allclose(watch.scores[:positions], wanted, atol=1e-5)


def test_rows_that_nobody_waits_for_are_scored_some_steps_later() -> None:
    """What is computed again in the meantime (a rejected draft, a preemption) counts as it was
    last.
    """
    steps = Steps("flag", "none", "flag")
    steps.take((0, 0, 5), (1, 0, 3), (2, 0, 1))
    for position in range(1, 14):
        steps.take((2, position, 1), (0, 4 + position, 1))
    # positions 10 to 13 again, out of order, and others in between
    steps.take((0, 10, 4), (1, 3, 1))
    assert [watch.reached for watch in steps.watches] == [0, 0, 0]
    steps.take((2, 14, 1))
    for request, positions in ((0, 18), (1, 4), (2, 15)):
        steps.assert_scored(request, positions)


def test_a_request_that_is_over_is_scored_and_others_wait_on() -> None:
    steps = Steps("flag", "flag")
    for position in range(3):
        steps.take((0, position, 1), (1, position, 1))
    steps.scorer.settle({steps.watches[0]: 3})
    steps.assert_scored(0, 3)
    assert steps.watches[1].reached == 0
    steps.scorer.settle(dict.fromkeys(steps.watches, 3))
    steps.assert_scored(1, 3)


@pytest.mark.parametrize(("action", "streams"), [("stop", False), ("steer", False), ("flag", True)])
def test_scores_that_somebody_waits_for_are_there_after_the_step(
    action: Action, streams: bool
) -> None:
    steps = Steps(action, "none", streams=streams)
    steps.take((1, 0, 2), (0, 0, 2))
    steps.assert_scored(0, 2)
    assert steps.watches[1].reached == (2 if streams else 0)


def test_rows_of_large_steps_are_not_kept() -> None:
    """They hold the rows of all requests of their steps."""
    steps = Steps("flag")
    most = _BYTES // (4 * HIDDEN)
    steps.take((0, 0, 1), unused=most // 2)
    assert steps.watches[0].reached == 0
    steps.take((0, 1, 1), unused=most // 2)
    steps.assert_scored(0, 2)


def test_many_rows_are_scored_in_parts() -> None:
    steps = Steps("stop")
    steps.take((0, 0, 2 * _CHUNK // HIDDEN + 3))
    steps.assert_scored(0, 2 * _CHUNK // HIDDEN + 3)


def test_rows_that_cannot_be_scored_later_are_an_error_of_the_step_that_tries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = Steps("flag")
    steps.take((0, 0, 1))
    monkeypatch.setattr("midstream.workers.runner.plane.probe_scores._products", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        steps.scorer.settle(dict.fromkeys(steps.watches, 1))
    steps.scorer.settle(dict.fromkeys(steps.watches, 1))  # said once


class Copying:
    """The landing of rows that an accelerator copies until it is told to be done."""

    def __init__(self) -> None:
        self.over, self.waited = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.waited.set()
        assert self.over.wait(60)

    def done(self) -> bool:
        return self.over.is_set()


def test_the_model_does_not_wait_while_another_thread_waits_for_rows() -> None:
    """The thread of an asynchronous output waits for the news of its step."""
    steps, landing = Steps("stop", waits=False), Copying()
    steps.take((0, 0, 2), landing=landing)
    reader = threading.Thread(target=steps.scorer.news())
    reader.start()
    assert landing.waited.wait(60)
    model = threading.Thread(target=steps.scorer.settle, args=({},))
    model.start()
    model.join(10)
    blocked = model.is_alive()
    landing.over.set()
    for thread in (reader, model):
        thread.join()
    assert not blocked
    steps.assert_scored(0, 2)


def test_an_ended_request_waits_for_its_own_rows_alone() -> None:
    """Not for another request's, nor for the row of its last token, which does not count."""
    steps = Steps("stop", "flag", waits=False)
    own, surplus, other = Copying(), Copying(), Copying()
    own.over.set()
    steps.take((0, 0, 2), landing=own)
    steps.take((0, 2, 1), landing=surplus)
    steps.take((1, 0, 1), landing=other)
    steps.scorer.settle({steps.watches[0]: 2})
    steps.assert_scored(0, 2)
    assert [landing.waited.is_set() for landing in (own, surplus, other)] == [True, False, False]
