"""The scorer of a rank: scores of a step's rows equal numpy's, whichever probes read them and wherever the rows lie."""

import numpy as np
import torch

from midstream.schemas.probes import ProbeContent, StoredProbe
from midstream.schemas.specs import RankSpec, probe_captures
from midstream.schemas.tensors import Tensor, content_hash, from_numpy
from midstream.workers.runner.capture import Extent, Recording, StepRows
from midstream.workers.runner.landing import LANDED
from midstream.workers.runner.probes import Scorer
from midstream.workers.runner.steering_tables import VectorStore

HIDDEN, LAYERS = 16, 3
rng = np.random.default_rng(0)


class Weights:
    """Random ones, of `k` labels at a layer, kept in a store."""

    def __init__(self, vectors: VectorStore, layer: int, k: int, name: str) -> None:
        self.weight, self.bias = (rng.normal(size=shape).astype(np.float32) for shape in ((k, HIDDEN), (k,)))
        tensors: list[Tensor] = [from_numpy(self.weight), from_numpy(self.bias)]
        for tensor in tensors:
            vectors.put(content_hash(tensor), tensor)
        content = ProbeContent(
            hook="post_block", layer=layer, tensors=[content_hash(tensor) for tensor in tensors], labels=[str(n) for n in range(k)],
            thresholds=[None] * k,
        )  # fmt: skip
        self.layer, self.probe = layer, StoredProbe(name=name, digest=content.digest, content=content)


def test_scores_of_a_step_equal_numpy() -> None:
    """Requests of two sets of probes, whose labels are not in the order of their layers; prompts among tokens that follow one another."""
    vectors = VectorStore()
    first = [Weights(vectors, layer, k, str(number)) for number, (layer, k) in enumerate(((2, 1), (0, 3), (2, 2), (1, 1)))]
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
        recording = Recording(capture, dict(ports), np.zeros(2 * LAYERS, dtype=bool))
        spec = RankSpec(version="", job=str(number), request=0, attempt=1, prompt_tokens=1, probes=probes)
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


def test_rows_that_follow_one_another_are_scored_where_they_lie() -> None:
    """As of requests that all generate: scores are those of rows in any order."""
    vectors = VectorStore()
    weights = Weights(vectors, 0, 2, "p")
    (capture,) = probe_captures([weights.probe])
    slab = torch.randn(8, HIDDEN)
    for order in (range(8), [0, 2, 1, 4, 3, 6, 5, 7]):
        scorer = Scorer(vectors, HIDDEN, waits=True)
        step, made = StepRows(slab, np.zeros(2, dtype=np.int64), np.zeros(2, dtype=np.int64), LANDED), []
        for slot in order:
            recording = Recording(capture, {("post_block", 0): 0}, np.array([True, False]))
            watch = scorer.watch(
                "r", RankSpec(version="", job="", request=0, attempt=1, prompt_tokens=1, probes=[weights.probe]), [recording]
            )
            assert watch is not None
            made.append((watch, recording, slot))
        scorer.take([(recording, Extent(step, np.array([slot]), 0, 1)) for _, recording, slot in made], [])
        for watch, _, slot in made:
            np.testing.assert_allclose(watch.scores[0], slab[slot].numpy() @ weights.weight.T + weights.bias, atol=1e-5)
