"""Hundreds of requests at once, on an engine with too little of everything: is any row
another's?

Random lengths, captures, interventions and cancellations; prompts that share blocks; requests that
need no token beside others; a KV cache so small that requests preempt one another; fewer steering
rows than configurations. v1 runner, with drafts, two ranks and two stages too. fp32.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from host import Host, capture_of, prompt_of, relative_error
from reference import Edit, Reference
from tiny import HIDDEN, LAYERS
from tolerances import FP32_ROWS

from midstream.schemas.base.tensors import Tensor, from_numpy, to_numpy
from midstream.schemas.prompts.selectors import (
    HOOKS,
    STREAM_HOOKS,
    Span,
    resolve_positions,
)
from midstream.schemas.prompts.windows import Around, HeadAndTail
from midstream.schemas.requests.interventions import STEERING_FIELDS
from midstream.schemas.requests.specs import SteeringSpec, StoredCapture

pytestmark = pytest.mark.long

REQUESTS = 400
VECTORS = 6


#: Name → checkpoint and settings of an engine.
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "v1": ("llama", {}),
    "drafts": (
        "llama",
        {"speculative_tokens": 3, "engine.max_num_batched_tokens": 384},
    ),
    "tp2": ("qwen3", {"engine.tensor_parallel_size": 2}),
    "pp2": ("qwen3", {"engine.pipeline_parallel_size": 2}),
}


@pytest.fixture(scope="module", params=ENGINES)
def crowded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Host]:
    checkpoint, settings = ENGINES[request.param]
    host = Host(
        tmp_path_factory.mktemp("crowded"),
        request.getfixturevalue(checkpoint),
        **{"engine.num_gpu_blocks_override": 8, "engine.max_num_batched_tokens": 256} | settings,
        **{
            "tuning.steering_rows": 2,  # two entries at two places need as many
            "tuning.steering_entries": 24,
            "tuning.capture_queue_mib": 64,
        },
        # two of rank 4 in one request take 16: what is free is scattered, and runs must move
        fault="rpc",
    )
    yield host
    host.close()


def random_positions(rng: np.random.Generator, prompt: int) -> Any:
    kind = str(rng.choice(["all", "all_prompt", "all_generated", "last_prompt", "list", "range"]))
    if kind == "list":
        return sorted({int(p) for p in rng.integers(0, prompt, 3)})
    if kind == "range":
        start = int(rng.integers(0, prompt + 4))
        length = int(rng.integers(1, 60))
        return Span(start=start, stop=None if rng.random() < 0.5 else start + length)
    return kind


def random_window(rng: np.random.Generator) -> Span | None:
    """A window over all positions for every third capture."""
    kind = int(rng.integers(0, 9))
    if kind == 0:
        return Span(last=int(rng.integers(1, 40)))
    if kind == 1:
        ends = HeadAndTail(head=int(rng.integers(1, 30)), tail=int(rng.integers(0, 30)))
        return Span(head_and_tail=ends)
    if kind == 2:
        tokens = [[int(token)] for token in rng.integers(0, 100, 16)]
        return Span(around=Around(token_ids=tokens, before=int(rng.integers(0, 4)), after=2))
    return None


def random_capture(rng: np.random.Generator, prompt: int, depth: int = LAYERS) -> StoredCapture:
    hooks = [hook for hook in HOOKS if rng.random() < 0.4] or ["post_block"]
    window = random_window(rng)
    return capture_of(
        [],
        "all" if window else resolve_positions(random_positions(rng, prompt), prompt),
        window=window,
        sites={hook: sorted({int(layer) for layer in rng.integers(0, depth, 3)}) for hook in hooks},
        at=str(rng.choice(["before", "after"])),
        every_n=int(rng.integers(1, 4)),
        layout=str(rng.choice(["auto", "packed", "per_file", "segment"])),
    )


#: Family → a random one of it; `v` and `m` are drawn from few, so that configurations are shared.
FAMILIES: dict[str, Callable[[np.random.Generator, Tensor, list[Tensor]], dict[str, Any]]] = {
    "replace": lambda rng, v, m: {
        "op": "replace",
        "vector": v,
        "alpha": float(rng.choice([0.25, 1.0])),
    },
    "lowrank": lambda rng, v, m: {
        "op": "lowrank",
        "rotation": m[0],
        "weight": m[1],
        "bias": m[2],
        "strength": 0.5,
    },
    "add": lambda rng, v, m: {"op": "add", "vector": v, "scale": float(rng.choice([0.5, 1.0]))},
    "add_matched": lambda rng, v, m: {"op": "add", "vector": v, "scale": 0.2, "norm_match": True},
    "ablate": lambda rng, v, m: {
        "op": "ablate",
        "vector": v,
        "strength": float(rng.choice([0.5, 1.0])),
    },
    "clamp": lambda rng, v, m: {
        "op": "clamp",
        "vector": v,
        "low": -0.5,
        "high": float(rng.choice([0.0, 1.0])),
    },
}


def random_steering(
    rng: np.random.Generator, vectors: list[Tensor], matrices: list[list[Tensor]], prompt: int
) -> list[SteeringSpec]:
    """One or two entries; of two often both at one place."""
    layer = int(rng.integers(LAYERS))
    hook = HOOKS[rng.integers(len(HOOKS))]
    specs = []
    for _ in range(rng.integers(1, 3)):
        if rng.random() < 0.5:
            layer = int(rng.integers(LAYERS))
            hook = HOOKS[rng.integers(len(HOOKS))]
        family = str(
            rng.choice([name for name in FAMILIES if name != "add_matched" or hook in STREAM_HOOKS])
        )
        fields = FAMILIES[family](
            rng, vectors[rng.integers(len(vectors))], matrices[rng.integers(len(matrices))]
        )
        specs.append(
            SteeringSpec(layers=layer, hook=hook, positions=random_positions(rng, prompt), **fields)
        )
    return specs


def edits_of(specs: list[SteeringSpec], prompt: int, total: int) -> list[Edit]:
    """Family by family, of one family in the order written: as is documented."""
    named = {
        "all": range(total),
        "all_prompt": range(prompt),
        "all_generated": range(prompt, total),
        "last_prompt": [prompt - 1],
    }
    ordered = sorted(
        specs, key=lambda spec: list(FAMILIES).index("add_matched" if spec.norm_match else spec.op)
    )
    edits = []
    for spec in ordered:
        where = named[spec.positions] if isinstance(spec.positions, str) else spec.positions
        if isinstance(where, Span):
            where = range(where.start or 0, total if where.stop is None else where.stop)
        takes = STEERING_FIELDS[spec.op]
        fields = {name: getattr(spec, name) for name in (*takes.tensors, *takes.options)}
        given = {
            name: to_numpy(value) if isinstance(value, Tensor) else value
            for name, value in fields.items()
            if value is not None
        }
        edits.append(
            Edit(
                spec.layers,
                positions=[position for position in where if position < total],
                hook=spec.hook,
                op=spec.op,
                **given,
            )
        )
    return edits


def test_every_row_of_hundreds_of_mixed_requests_equals_that_of_a_solo_run(
    crowded: Host,
) -> None:
    reference = Reference(Path(crowded.settings.model))
    rng = np.random.default_rng(20)  # field cases 1, 6, 24
    vectors = [from_numpy(rng.normal(size=HIDDEN)) for _ in range(VECTORS)]
    matrices = [
        [
            from_numpy(rng.normal(size=shape) / np.sqrt(HIDDEN))
            for shape in ((rank, HIDDEN), (rank, HIDDEN), (rank,))
        ]
        for rank in (1, 4)
    ]
    beginnings = [prompt_of(128, seed=1000 + number) for number in range(3)]
    jobs = []
    cancelled = {}
    steered = {}
    for number in range(REQUESTS):
        prompt = prompt_of(
            int(rng.choice([rng.integers(1, 60), rng.integers(105, 128), rng.integers(128, 220)])),
            seed=number,
        )
        if rng.random() < 0.3:
            prompt = beginnings[rng.integers(len(beginnings))] + prompt[:90]
        shallow = rng.random() < 0.4
        depth = int(rng.integers(1, LAYERS + 1)) if shallow else LAYERS
        captures = [
            random_capture(rng, len(prompt), depth)
            for _ in range(1 if shallow else rng.integers(0, 2))
        ]
        specs = random_steering(rng, vectors, matrices, len(prompt)) if rng.random() < 0.4 else []
        jobs.append(
            crowded.job(
                prompt,
                max_tokens=0 if shallow else int(rng.integers(1, 28)),
                capture=captures,
                steering=crowded.steering(*specs),
            )
        )
        steered[jobs[-1].id] = specs
        if rng.random() < 0.05:
            cancelled[jobs[-1].id] = int(rng.integers(1, 8))
    outputs = crowded.run(*jobs, cancel_after=cancelled)
    status = crowded.call("midstream_status")[0]
    assert status["preemptions"] > 0
    assert status["skipped_rows"] > 0
    compared = worst = 0.0
    for job in jobs:
        if not job.captures or not outputs[job.id]:  # nothing to compare, or cancelled
            continue
        capture = job.captures[0][0]
        tokens = job.prompts[0].token_ids + (outputs[job.id][0].token_ids or [0])
        reader = crowded.capture(job)
        wanted_positions = list(capture.select(0, len(tokens) - 1, len(job.prompts[0].token_ids)))
        if capture.window is not None:
            wanted_positions = sorted(capture.window.keep(wanted_positions, tokens))
        assert reader.positions() == wanted_positions, job
        assert reader.token_ids() == [tokens[position] for position in wanted_positions]
        if not wanted_positions:
            continue
        edits = edits_of(steered[job.id], len(job.prompts[0].token_ids), len(tokens) - 1)
        solo = reference.rows(tokens[:-1], edits, capture.at)
        for hook, layers in capture.sites.items():
            assert reader.layers(hook=hook) == layers
            for layer in layers:
                error = relative_error(
                    reader.array(layer, hook), solo[hook, layer][wanted_positions]
                )
                assert error <= FP32_ROWS, (job, hook, layer, error)
                compared += len(wanted_positions)
                worst = max(worst, error)
    print(
        f"{compared:.0f} rows of {len(jobs)} requests, worst relative error "
        f"{worst:.2g}, {status['preemptions']} preemptions"
    )
    after = crowded.call("midstream_status")[0]
    assert after["rows_used"] == 0
    assert after["entries_used"] == 0
    assert after["requests"] == 0
