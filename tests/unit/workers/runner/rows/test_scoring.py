"""The scorer of a rank: scores of a step's rows equal numpy's, whichever probes read them and
wherever the rows lie.
"""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from midstream.schemas.artifacts.probes import ProbeAction, ProbeContent, StoredProbe
from midstream.schemas.base.tensors import Tensor, content_hash, from_numpy
from midstream.schemas.requests.specs import RankSpec, probe_captures
from midstream.workers.runner.base.landings import LANDED, Landing
from midstream.workers.runner.edits.steering_tables import VectorStore
from midstream.workers.runner.files.recorded import Extent
from midstream.workers.runner.hooks.sites import RankSite
from midstream.workers.runner.plane import probe_scores
from midstream.workers.runner.plane.probe_scores import _CHUNK, Scorer
from midstream.workers.runner.rows.arena import Arena, BankRows, RecordedBlock
from midstream.workers.runner.rows.capture import Ports, Recording, reused_rows

HIDDEN = 16
LAYERS = 3
PORTS = Ports(
    [RankSite("post_block", layer, "single") for layer in range(LAYERS)], HIDDEN, "float32"
)
rng = np.random.default_rng(0)


class Weights:
    """Random ones, of `k` labels at a layer, kept in a store."""

    def __init__(
        self, vectors: VectorStore, layer: int, k: int, name: str, action: ProbeAction = "stop"
    ) -> None:
        self.weight, self.bias = (
            rng.normal(size=shape).astype(np.float32) for shape in ((k, HIDDEN), (k,))
        )
        tensors: list[Tensor] = [from_numpy(self.weight), from_numpy(self.bias)]
        vectors.put({content_hash(tensor): tensor for tensor in tensors})
        content = ProbeContent(
            hook="post_block",
            layer=layer,
            tensors=[content_hash(tensor) for tensor in tensors],
            labels=[str(n) for n in range(k)],
            thresholds=[None] * k,
        )
        self.layer = layer
        self.probe = StoredProbe(
            name=name, digest=content.digest, content=content, actions=[action]
        )


def rows_at(extent: Extent, port: int) -> np.ndarray:
    return extent.rows(extent.block.ports.tolist().index(port))


def recorded(
    recording: Recording, first: int, count: int, memory: BankRows, landing: Landing = LANDED
) -> Iterator[Extent]:
    """Random rows of these positions, in the recording's blocks."""
    while count:
        block = recording.block_of(first, memory)
        part = min(count, block.span.stop - first)
        extent = Extent(block, block.slot(first), first, part, landing)
        block.rows[:, extent.at : extent.at + part] = rng.normal(
            size=(len(block.ports), part, HIDDEN)
        )
        yield extent
        first += part
        count -= part


def test_scores_of_a_step_equal_numpy() -> None:
    """Requests of two sets of probes, whose labels are not in the order of their layers; prompts
    among tokens that follow one another; rows in several blocks, and kept rows of a capture with
    more sites.
    """
    vectors = VectorStore()
    first = [
        Weights(vectors, layer, k, str(number))
        for number, (layer, k) in enumerate(((2, 1), (0, 3), (2, 2), (1, 1)))
    ]
    sets = [first, first[1:2]]
    scorer = Scorer(vectors, HIDDEN)
    memory = BankRows(Arena(0), HIDDEN, torch.float32)
    kept = RecordedBlock(memory, np.arange(2 * LAYERS).tobytes(), range(5), range(5))
    kept.rows[:] = rng.normal(size=kept.rows.shape)
    counts = [1, 4, 1, 1, 3, 1]
    recordings = []
    watches = []
    items = []
    wanted = []
    for number, count in enumerate(counts):
        probes = [each.probe for each in sets[number % 2]]
        (capture,) = probe_captures(probes)
        served = [Extent(kept, 3, 0, 2)] if number == 4 else []
        recordings.append(Recording(capture, PORTS, 1, reused=served, span=2))
        spec = RankSpec(
            version="", job=str(number), request=0, attempt=1, prompt_tokens=1, probes=probes
        )
        watches.append(scorer.watch(str(number), spec, recordings[-1:]))
        recordings[-1].reused += recorded(
            recordings[-1], 2 * len(served), count - 2 * len(served), memory
        )
        runs = recordings[-1].reused
        items += reused_rows(recordings[-1])
        scores = [
            np.concatenate(
                [run.rows(run.block.ports.tolist().index(2 * each.layer)) for run in runs]
            )
            @ each.weight.T
            + each.bias
            for each in sets[number % 2]
        ]
        wanted.append(np.concatenate(scores, axis=1))
    scorer.take(items)
    for watch, count, scores in zip(watches, counts, wanted, strict=True):
        np.testing.assert_allclose(watch.rows["scores"][:count], scores, atol=1e-5)
        assert watch.reached == count
        assert np.isnan(watch.rows["scores"][count:]).all()


class Steps:
    """Requests with a probe each, at layer 0, and steps that compute rows of them."""

    def __init__(self, *actions: ProbeAction, streams: bool = False, span: int = 16) -> None:
        vectors = VectorStore()
        self._memory = BankRows(Arena(0), HIDDEN, torch.float32)
        self.scorer = Scorer(vectors, HIDDEN)
        self.weights = [
            Weights(vectors, 0, 2, str(number), action) for number, action in enumerate(actions)
        ]
        # of each request: position → its row as it was last
        self.rows: list[dict[int, np.ndarray]] = [{} for _ in actions]
        self.recordings = []
        self.watches = []
        for number, each in enumerate(self.weights):
            (capture,) = probe_captures([each.probe])
            self.recordings.append(Recording(capture, PORTS, 1, span=span))
            spec = RankSpec(
                version="",
                job="",
                request=0,
                attempt=1,
                prompt_tokens=1,
                probes=[each.probe],
                stream_scores=streams,
            )
            self.watches.append(self.scorer.watch(str(number), spec, self.recordings[-1:]))

    def take(self, *windows: tuple[int, int, int], landing: Landing = LANDED) -> None:
        """(request, first position, how many) of one step."""
        items = []
        for request, first, count in windows:
            recording = self.recordings[request]
            recording.reused += recorded(recording, first, count, self._memory, landing)
            rows = np.concatenate([extent.rows(0) for extent in recording.reused])
            self.rows[request] |= zip(range(first, first + count), rows, strict=True)
            items += reused_rows(recording)
        self.scorer.take(items)
        for request, first, count in windows:
            self.recordings[request].leave(first + count, landing)

    @property
    def ends(self) -> list[int]:
        """The first position of each request that no step has computed."""
        return [len(rows) for rows in self.rows]

    def assert_scored(self, request: int, positions: int) -> None:
        watch = self.watches[request]
        weights = self.weights[request]
        wanted = (
            np.stack([self.rows[request][position] for position in range(positions)])
            @ weights.weight.T
            + weights.bias
        )
        assert watch.reached == positions
        np.testing.assert_allclose(watch.rows["scores"][:positions], wanted, atol=1e-5)


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


def test_a_request_that_is_over_is_scored_and_later_rows_wait_on() -> None:
    """Earlier rows of alike probes are scored with its own, in one product."""
    steps = Steps("flag", "flag")
    for position in range(3):
        steps.take((0, position, 1), (1, position, 1))
    steps.scorer.settle({steps.watches[0]: 3})
    steps.assert_scored(0, 3)
    assert steps.watches[1].reached == 2
    steps.scorer.settle(dict.fromkeys(steps.watches, 3))
    steps.assert_scored(1, 3)


@pytest.mark.parametrize(("action", "streams"), [("stop", False), ("steer", False), ("flag", True)])
def test_scores_that_somebody_waits_for_are_there_after_the_step(
    action: ProbeAction, streams: bool
) -> None:
    steps = Steps(action, "none", streams=streams)
    steps.take((1, 0, 2), (0, 0, 2))
    steps.assert_scored(0, 2)
    assert steps.watches[1].reached == (2 if streams else 0)


def test_alike_probes_are_scored_together_whichever_rows_each_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One has many more rows than the others, which are padded; some are of several steps."""
    products = []
    original = probe_scores._products

    def counted(memory: torch.Tensor, numbers: np.ndarray, *rest: torch.Tensor) -> torch.Tensor:
        products.append(numbers.shape)
        return original(memory, numbers, *rest)

    monkeypatch.setattr(probe_scores, "_products", counted)
    steps = Steps(*["flag"] * 12)
    steps.take(*[(number, 0, 100 if number == 5 else 1 + number % 3) for number in range(12)])
    for _ in range(15):
        steps.take(*[(number, steps.ends[number], 1) for number in range(0, 12, 2)])
    for number in range(12):
        steps.assert_scored(number, steps.ends[number])
    assert sorted(products) == [(1, 100), (11, 18)]


def test_rows_that_are_kept_for_later_are_bounded_by_their_own_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other rows of their steps do not count: nothing keeps those."""
    monkeypatch.setattr(probe_scores, "_BYTES", 64 * 4 * HIDDEN)
    steps = Steps("flag", "stop")
    steps.take((0, 0, 1), (1, 0, 100))
    steps.take((0, 1, 62))
    assert steps.watches[0].reached == 0
    steps.take((0, 63, 1))
    steps.assert_scored(0, 64)


def test_many_rows_are_scored_in_parts() -> None:
    steps = Steps("stop", span=_CHUNK // HIDDEN)
    steps.take((0, 0, 2 * _CHUNK // HIDDEN + 3))
    steps.assert_scored(0, 2 * _CHUNK // HIDDEN + 3)


def test_rows_that_cannot_be_scored_later_are_an_error_of_the_step_that_tries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = Steps("flag")
    steps.take((0, 0, 1))
    monkeypatch.setattr(probe_scores, "_products", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        steps.scorer.settle(dict.fromkeys(steps.watches, 1))
    steps.scorer.settle(dict.fromkeys(steps.watches, 1))  # said once


class Copying:
    """The landing of rows that an accelerator copies until it is told to be done."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.waited = threading.Event()

    def wait(self) -> None:
        self.waited.set()
        assert self.over.wait(60)

    def done(self) -> bool:
        return self.over.is_set()


def test_the_model_does_not_wait_while_another_thread_waits_for_rows() -> None:
    """The thread of an asynchronous output waits for the news of its step."""
    steps = Steps("stop")
    landing = Copying()
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
    steps = Steps("stop", "flag")
    own = Copying()
    surplus = Copying()
    other = Copying()
    steps.take((0, 0, 2), landing=own)
    steps.take((0, 2, 1), landing=surplus)
    steps.take((1, 0, 1), landing=other)
    own.over.set()
    steps.scorer.settle({steps.watches[0]: 2})
    steps.assert_scored(0, 2)
    assert [landing.waited.is_set() for landing in (own, surplus, other)] == [True, False, False]
