"""Hundreds of requests at once, on an engine with too little of everything: is any row
another's?

Random lengths, captures, interventions and cancellations; a KV cache so small that requests preempt
one another; fewer steering rows than configurations. v1 runner, fp32.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from host import Host, capture_of, prompt_of, relative_error, steer
from reference import Edit, Reference
from size_kit import both_sides, check_sizes
from test_modes import one_of_each
from tiny import HIDDEN, LAYERS
from tolerances import FP32_ROWS

from midstream.schemas.base.tensors import Tensor, from_numpy, to_numpy
from midstream.schemas.prompts.selectors import (
    HOOKS,
    STREAM_HOOKS,
    Span,
    resolve_positions,
    select,
)
from midstream.schemas.prompts.windows import Around, HeadAndTail
from midstream.schemas.requests.interventions import STEERING_FIELDS
from midstream.schemas.requests.specs import SteeringSpec, StoredCapture

pytestmark = pytest.mark.long

REQUESTS = 400
VECTORS = 6
ALL = {hook: list(range(LAYERS)) for hook in HOOKS}


@pytest.fixture(scope="module")
def crowded(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    host = Host(
        tmp_path_factory.mktemp("crowded"),
        llama,
        num_gpu_blocks=8,
        max_num_batched_tokens=256,
        steering_rows=5,
        # two of rank 4 in one request take 16: what is free is scattered, and runs must move
        steering_entries=24,
        capture_queue_mib=64,
        fault="rpc",
    )
    yield host
    host.close()


def random_positions(rng: np.random.Generator, prompt: int) -> Any:
    kind = str(rng.choice(["all", "all_prompt", "all_generated", "last_prompt", "list", "range"]))
    if kind == "list":
        return sorted({int(p) for p in rng.integers(0, prompt, 3)})
    if kind == "range":
        start, length = int(rng.integers(0, prompt + 4)), int(rng.integers(1, 60))
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


def random_capture(rng: np.random.Generator, prompt: int) -> StoredCapture:
    hooks = [hook for hook in HOOKS if rng.random() < 0.4] or ["post_block"]
    window = random_window(rng)
    return capture_of(
        [],
        "all" if window else resolve_positions(random_positions(rng, prompt), prompt),
        window=window,
        sites={
            hook: sorted({int(layer) for layer in rng.integers(0, LAYERS, 3)}) for hook in hooks
        },
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
    layer, hook, specs = int(rng.integers(LAYERS)), HOOKS[rng.integers(len(HOOKS))], []
    for _ in range(rng.integers(1, 3)):
        if rng.random() < 0.5:
            layer, hook = int(rng.integers(LAYERS)), HOOKS[rng.integers(len(HOOKS))]
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
        fields = {
            name: getattr(spec, name)
            for takes in [STEERING_FIELDS[spec.op]]
            for name in (*takes.tensors, *takes.options)
        }
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
    crowded: Host, reference: Reference
) -> None:
    rng = np.random.default_rng(20)  # field cases 1, 6, 24
    vectors = [from_numpy(rng.normal(size=HIDDEN)) for _ in range(VECTORS)]
    matrices = [
        [
            from_numpy(rng.normal(size=shape) / np.sqrt(HIDDEN))
            for shape in ((rank, HIDDEN), (rank, HIDDEN), (rank,))
        ]
        for rank in (1, 4)
    ]
    jobs, cancelled, steered = [], {}, {}
    for number in range(REQUESTS):
        prompt = prompt_of(
            int(rng.choice([rng.integers(1, 60), rng.integers(105, 128), rng.integers(128, 220)])),
            seed=number,
        )
        captures = [random_capture(rng, len(prompt)) for _ in range(rng.integers(0, 2))]
        specs = random_steering(rng, vectors, matrices, len(prompt)) if rng.random() < 0.4 else []
        jobs.append(
            crowded.job(
                prompt,
                max_tokens=int(rng.integers(1, 28)),
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
    compared = worst = 0.0
    for job in jobs:
        if not job.captures or not outputs[job.id]:  # nothing to compare, or cancelled
            continue
        capture = job.captures[0][0]
        tokens = job.prompts[0].token_ids + outputs[job.id][0].token_ids
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
                compared, worst = compared + len(wanted_positions), max(worst, error)
    print(
        f"{compared:.0f} rows of {len(jobs)} requests, worst relative error "
        f"{worst:.2g}, {status['preemptions']} preemptions"
    )
    after = crowded.call("midstream_status")[0]
    assert (after["rows_used"], after["entries_used"], after["requests"]) == (0, 0, 0)


@pytest.mark.matrix
def test_sizes_and_limits_hold_in_mixed_traffic(crowded: Host) -> None:
    """Random additions, positions, limits and lengths; requests take turns in the KV cache."""
    rng = np.random.default_rng(44)
    vectors = [crowded.vector(rng.normal(size=HIDDEN).astype(np.float32)) for _ in range(VECTORS)]
    jobs, chosen, limits = [], {}, {}
    for number in range(80):
        prompt = prompt_of(int(rng.integers(5, 220)), seed=number)
        layer, limit = int(rng.integers(LAYERS)), float(rng.choice([0.0, 0.2, 0.6, -0.3]))
        positions = resolve_positions(random_positions(rng, len(prompt)), len(prompt))
        entry = steer(
            vectors[rng.integers(VECTORS)], [layer], float(rng.choice([0.02, 3.0])), limit=limit
        )
        entry = msgspec.structs.replace(entry, positions=positions)
        job = crowded.job(
            prompt,
            max_tokens=int(rng.integers(1, 28)),
            capture=both_sides([layer]),
            steering=[entry],
        )
        jobs.append(job)
        chosen[job.id], limits[job.id] = (layer, positions), limit
    before = crowded.call("midstream_status")[0]["preemptions"]
    outputs = crowded.run_any(*jobs).outputs
    assert crowded.call("midstream_status")[0]["preemptions"] > before
    scaled = failed = 0
    for job in jobs:
        (layer, positions), limit = chosen[job.id], limits[job.id]
        (receipt,) = crowded.receipts(job)
        if receipt.kind == "edit_too_large":
            assert limit < 0, receipt
            failed += 1
            continue
        assert receipt.status == "ok", receipt
        total = len(job.prompts[0].token_ids) + len(outputs[job.id][0].token_ids) - 1
        edited = select(positions, 0, total, len(job.prompts[0].token_ids))
        if not edited:
            assert receipt.sizes == []
            continue
        (largest,) = check_sizes(crowded, job, [layer], edited)
        if limit:
            assert largest <= abs(limit), (job.id, largest, limit)
            scaled += largest > 0.99 * limit > 0
    assert scaled > 10, scaled
    assert failed > 3, failed


def strong() -> list[list[Edit]]:
    """Every family, as strong as can be, over all hooks: a row of the table for each request."""
    rng = np.random.default_rng(5)
    vector = rng.normal(size=HIDDEN).astype(np.float32)
    rotation, weight = (rng.normal(size=(2, 3, HIDDEN)) / np.sqrt(HIDDEN)).astype(np.float32)
    return [
        [Edit(0, vector, hook="attn_out", op="replace", scale=30.0)],
        [
            Edit(
                1,
                hook="mlp_in",
                op="lowrank",
                rotation=rotation,
                weight=weight,
                bias=50 * np.ones(3, np.float32),
                strength=9.0,
            )
        ],
        [
            Edit(2, vector, hook="pre_attn", scale=30.0),
            Edit(2, vector, hook="post_block", scale=5.0, norm_match=True),
        ],
        [Edit(3, vector, hook="post_attn", op="ablate", strength=30.0)],
        [Edit(1, vector, hook="mlp_out", op="clamp", low=50.0, high=60.0)],
    ]


#: What makes each op do nothing.
NOTHING = {
    "add": {"scale": 0.0},
    "replace": {"alpha": 0.0},
    "lowrank": {"strength": 0.0},
    "ablate": {"strength": 0.0},
    "clamp": {"strength": 0.0},
}
BESIDE: dict[str, list[list[Edit]]] = {
    "nothing": [[] for _ in strong()],
    "zeros": [[edit._replace(**NOTHING[edit.op]) for edit in edits] for edits in strong()],
    "strong": strong(),
}


@dataclass
class Batch:
    """Requests without steering, and others with it beside them.

    Rows and log-probabilities in a fixed order.
    """

    plain: list[np.ndarray]
    others: list[np.ndarray]


@pytest.mark.matrix
def test_rows_beside_strong_interventions_equal_an_unedited_batch_bit_for_bit(
    crowded: Host,
) -> None:
    """The same batch composition, step by step: the ranks' record of it says so.

    Rows and logprobs are compared, not tokens.
    """
    # field case 1, field case 12

    def batch(beside: str) -> tuple[str, Batch]:
        plain = [
            crowded.job(
                prompt_of(20 + n, seed=n),
                max_tokens=8,
                capture=capture_of([], "all", sites=ALL),
                logprobs=3,
            )
            for n in range(5)
        ]
        others = [
            crowded.job(
                prompt_of(12 + n, seed=50 + n),
                max_tokens=8,
                capture=capture_of([3], "all_prompt"),
                steering=crowded.steering(*edits),
            )
            for n, edits in enumerate(BESIDE[beside])
        ]
        answers = crowded.run_together(
            *(job for pair in zip(plain, others, strict=True) for job in pair)
        )
        rows = [
            crowded.capture(job).array(layer, hook)
            for job in plain
            for hook, layers in ALL.items()
            for layer in layers
        ]
        rows += [
            np.array(
                [top.logprob for each in answers[job.id][0].logprobs or [] for top in each.top]
            )
            for job in plain
        ]
        return crowded.call("midstream_status")[0]["schedule"], Batch(
            rows, [crowded.capture(job).array(3) for job in others]
        )

    found: dict[tuple[str, str], Batch] = {}
    for _ in range(12):
        # all begin in one step; how far ahead the engine plans may differ: tried until three were
        # composed alike
        for beside in BESIDE:
            schedule, made = batch(beside)
            found[beside, schedule] = made
        for schedule in {schedule for _, schedule in found}:
            if all((beside, schedule) in found for beside in BESIDE):
                nothing, zeros, edited = (found[beside, schedule] for beside in BESIDE)
                assert len(nothing.plain[-1]) == 8 * 3
                for bare, beside_zeros, beside_edited in zip(
                    nothing.plain, zeros.plain, edited.plain, strict=True
                ):
                    assert np.array_equal(bare, beside_zeros)
                    assert np.array_equal(bare, beside_edited)
                for bare, zero, moved in zip(
                    nothing.others, zeros.others, edited.others, strict=True
                ):
                    assert np.array_equal(bare, zero)
                    assert relative_error(moved, bare) > 0.1, "each of them had an effect to leak"
                return
    pytest.fail("no three batches were composed alike")


CONFIGURATIONS = 40


def test_forty_configurations_on_five_rows_equal_their_solo_runs(
    crowded: Host, reference: Reference
) -> None:
    """All are in flight at once; each has vectors of its own, so no row is shared, and blocks are
    too few for those that run.
    """
    rng = np.random.default_rng(33)  # field case 6, field case 24
    before, jobs, wanted, cancelled = crowded.call("midstream_status")[0]["preemptions"], [], {}, {}
    for number in range(CONFIGURATIONS):
        edits = one_of_each(
            500 + number,
            layer=int(rng.integers(LAYERS)),
            hook=str(rng.choice(sorted(STREAM_HOOKS))),
        )
        edits = [edits[number % len(edits)]]
        prompt = prompt_of(int(rng.integers(100, 160)), seed=3000 + number)
        job = crowded.job(
            prompt,
            max_tokens=int(rng.integers(60, 120)),
            capture=capture_of([], "all", sites=ALL),
            steering=crowded.steering(*edits),
        )
        jobs.append(job)
        wanted[job.id] = edits
        if number % 8 == 3:
            cancelled[job.id] = int(rng.integers(1, 40))
    answer = crowded.run_any(*jobs, cancel_after=cancelled)
    assert not answer.errors
    assert answer.waiting >= CONFIGURATIONS // 2, "those without a row wait"
    assert crowded.call("midstream_status")[0]["preemptions"] > before
    finished = [job for job in jobs if job.id not in cancelled]
    assert len(finished) >= 32
    for job in finished:
        tokens = job.prompts[0].token_ids + answer.outputs[job.id][0].token_ids
        assert len(answer.outputs[job.id][0].token_ids) == job.sampling.max_tokens
        solo, reader = reference.rows(tokens[:-1], wanted[job.id]), crowded.capture(job)
        for hook, layers in ALL.items():
            for layer in layers:
                assert relative_error(reader.array(layer, hook), solo[hook, layer]) <= FP32_ROWS, (
                    job.id,
                    hook,
                    layer,
                )
    assert not any((crowded.root / "default" / name).exists() for name in cancelled)
    after = crowded.call("midstream_status")[0]
    assert (after["rows_used"], after["entries_used"], after["requests"]) == (0, 0, 0)
