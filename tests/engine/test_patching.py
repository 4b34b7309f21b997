"""A patched row is the source's row, and nothing else of the batch is touched, under strain and
beside other edits of the row. Tiny Llama, fp32.
"""

from pathlib import Path

import numpy as np
import pytest
from host import Host, capture_of, prompt_of, relative_error
from inside_reference import InsideReference
from patching_kit import (
    ALL,
    Cell,
    edits,
    everything,
    for_everyone,
    in_one_step,
    patch,
    patched_batch,
    patches,
    rows_of,
)
from reference import Edit, Reference
from rows_kit import check_rows
from test_inside import captured
from tiny import HIDDEN
from tolerances import FP32_ROWS

from midstream.schemas.jobs.jobs import Job
from midstream.schemas.prompts.selectors import HOOKS, STREAM_HOOKS
from midstream.schemas.requests.source_runs import RunRow, row_name
from midstream.schemas.requests.specs import Grade, StoredSteering, dims_name, dims_named
from midstream.schemas.requests.steering import GlobalSteering

CLEAN = prompt_of(24, seed=71)
CORRUPT = prompt_of(24, seed=72)


def ran(
    host: Host,
    prompt: list[int],
    steering: list[StoredSteering] | None = None,
    max_tokens: int = 1,
    at: str = "before",
) -> Job:
    """A job that is over, alone in its steps, with all rows captured."""
    job = host.job(prompt, max_tokens=max_tokens, capture=everything(at=at), steering=steering)
    host.run(job)
    return job


def same(left: dict[tuple[str, int], np.ndarray], right: dict[tuple[str, int], np.ndarray]) -> bool:
    return all(np.array_equal(left[site], right[site]) for site in left)


@pytest.fixture(scope="module")
def clean(cached: Host) -> Job:
    return ran(cached, CLEAN)


@pytest.fixture(scope="module")
def corrupt(cached: Host) -> Job:
    return ran(cached, CORRUPT)


def test_patching_with_alpha_zero_or_its_own_row_is_bit_exact(
    cached: Host, clean: Job, corrupt: Job
) -> None:
    cells = [Cell(hook, layer, position) for hook in HOOKS for layer in ALL for position in (0, 3)]
    plain = rows_of(cached, corrupt)
    for steering in (
        patches(cached.keep(clean), cells, alpha=0.0),
        patches(cached.keep(corrupt), cells),
    ):
        assert same(rows_of(cached, ran(cached, CORRUPT, steering)), plain)


@pytest.mark.parametrize(
    "hook",
    [
        pytest.param(hook, marks=[] if hook == "post_block" else pytest.mark.long)
        for hook in sorted(STREAM_HOOKS)
    ],
)
def test_patching_the_whole_stream_reproduces_the_source_run(
    cached: Host, clean: Job, corrupt: Job, hook
) -> None:
    """Bit for bit from there on, to the log-probabilities of the next token."""
    whole = patches(cached.keep(clean), [Cell(hook, 1, position) for position in range(len(CLEAN))])
    tokens = list(range(8, 40))
    graded = {}
    for name, prompt, steering in (
        ("clean", CLEAN, None),
        ("corrupt", CORRUPT, None),
        ("patched", CORRUPT, whole),
    ):
        job = cached.job(prompt, max_tokens=1, steering=steering, capture=everything())
        cached.run_any(job, grades={job.id: [Grade(tokens)]})
        (receipt,) = cached.receipts(job)
        assert receipt.status == "ok", receipt
        graded[name] = (receipt.graded, rows_of(cached, job))
    assert graded["patched"][0] == graded["clean"][0]
    assert graded["corrupt"][0] != graded["clean"][0]
    for layer in (2, 3):
        for each in HOOKS:
            assert np.array_equal(
                graded["patched"][1][each, layer], graded["clean"][1][each, layer]
            ), (each, layer)


@pytest.mark.parametrize("way", ["cached", "compiled", "v2", "tp2", "pp2"])
def test_every_engine_mode_patches_like_the_reference(
    way: str, request: pytest.FixtureRequest
) -> None:
    """Eager, compiled in chunks, the v2 runner, two ranks, two stages each with the layers of its
    own.
    """
    host: Host = request.getfixturevalue(way)
    reference = (
        Reference(request.getfixturevalue("qwen3"))
        if way in ("tp2", "pp2")
        else request.getfixturevalue("reference")
    )
    for job, wanted in patched_batch(host, reference, longest=80 if way == "v2" else 100):
        for receipt in host.receipts(job):
            mine = [
                edit for edit in wanted if way != "pp2" or (edit.layer >= 2) == bool(receipt.pp)
            ]
            assert (receipt.applied > 0) == bool(mine), (way, receipt)


# --- Cells under strain ---------------------------------------------------------------------------


BLOCK = 128
GRADE = [Grade(list(range(20, 60)))]


def graded(
    host: Host, prompt: list[int], steering: list[StoredSteering] | None = None
) -> tuple[int, list[float]]:
    """Tokens found in the prefix cache, and log-probabilities of the next token."""
    job = host.job(prompt, max_tokens=1, steering=steering)
    answer = host.run_any(job, grades={job.id: GRADE})
    assert not answer.errors, answer.errors
    (receipt,) = host.receipts(job)
    assert receipt.status == "ok", receipt
    return answer.outputs[job.id][0].cached_tokens, receipt.graded


def source_of(host: Host, prompt: list[int]) -> tuple[str, dict[tuple[str, int], np.ndarray]]:
    """The key of a new run with every row of the prompt, and those rows."""
    job = host.job(prompt, max_tokens=1, capture=everything("all_prompt"))
    host.run(job)
    return host.keep(job), rows_of(host, job)


def test_cells_share_blocks_below_their_patch_and_none_with_unpatched_requests(
    cached: Host,
) -> None:
    # field case 13
    """What a plain request finds after patched ones is, bit for bit, what it finds in a cache that
    never saw one.
    """
    prompt = prompt_of(300, seed=91)
    key, _ = source_of(cached, prompt_of(300, seed=92))

    def cell(position: int) -> list[StoredSteering]:
        return patches(key, [Cell("post_block", 1, position)])

    cached.call("restart_ledgers")
    fresh = [graded(cached, prompt) for _ in range(2)]
    assert [found for found, _ in fresh] == [0, 2 * BLOCK]
    cached.call("restart_ledgers")
    late, middle, early, again, beside = (
        graded(cached, prompt, cell(position)) for position in (290, 140, 5, 290, 291)
    )
    assert [each[0] for each in (late, middle, early, again, beside)] == [
        0,
        BLOCK,
        0,
        2 * BLOCK,
        2 * BLOCK,
    ]
    assert graded(cached, prompt, cell(140))[0] == 2 * BLOCK, "the same patch shares what it made"
    assert graded(cached, prompt) == fresh[1], "bit for bit"
    assert len({tuple(values) for _, values in (fresh[1], late, middle, early, beside)}) == 5, (
        "every patch showed"
    )


def test_a_run_lost_mid_request_fails_only_that_request(cached: Host) -> None:
    """The worker believes that the ranks have it; a cell beside it, of another run, and a plain
    request have their own numbers.
    """
    # field case 31, 32
    (gone, _), (kept, rows) = (
        source_of(cached, prompt_of(20, seed=93 + number)) for number in range(2)
    )
    warm = cached.job(
        prompt_of(12), max_tokens=1, steering=patches(gone, [Cell("post_block", 1, 2)])
    )
    cached.run(warm)
    assert cached.receipts(warm)[0].status == "ok"
    cached.call("midstream_drop_runs", [gone])
    cell = Cell("post_block", 1, 3)
    jobs = [
        cached.job(
            prompt_of(14, seed=1),
            max_tokens=1,
            capture=capture_of([1, 3], "all", at="after"),
            steering=patches(gone, [cell]),
        ),
        cached.job(
            prompt_of(14, seed=2),
            max_tokens=1,
            capture=capture_of([1, 3], "all", at="after"),
            steering=patches(kept, [cell]),
        ),
        cached.job(
            prompt_of(14, seed=3), max_tokens=1, capture=capture_of([1, 3], "all", at="after")
        ),
    ]
    cached.run_together(*jobs)
    in_one_step(cached, jobs[1:])
    receipts = [cached.receipts(job)[0] for job in jobs]
    assert [receipt.status for receipt in receipts] == ["error", "ok", "ok"]
    assert receipts[0].kind == "intervention_failed"
    assert f"source run {gone} is not on this rank" in receipts[0].message
    assert receipts[0].applied == 0
    assert np.array_equal(cached.capture(jobs[1]).array(1)[3], rows["post_block", 1][3])


@pytest.mark.parametrize("way", ["v1", "tp2", "pp2"])
def test_every_rank_patches_its_own_part_of_a_head_by_the_mask_of_its_name(
    way: str, request: pytest.FixtureRequest
) -> None:
    """The row comes from the files of all ranks, the mask from its name: head 2 is on the second
    rank of two.
    """
    host: Host = request.getfixturevalue(way)
    source = captured(
        host,
        host.job(prompt_of(12, seed=8), max_tokens=1),
        hooks={"z": [1, 3]},
        positions="all_prompt",
    )
    host.run(source)
    key = host.keep(source)
    masks = {1: "64-95", 3: "0-31,96-127"}
    steering = [
        patch(row_name(RunRow(key, "z", layer, 3)), "z", [layer], [7], mask=dims_name(dims))
        for layer, dims in masks.items()
    ]
    job = captured(
        host,
        host.job(prompt_of(12), max_tokens=1, steering=steering),
        hooks={"post_block": [3]},
        positions="all",
    )
    host.run(job)
    assert {receipt.status for receipt in host.receipts(job)} == {"ok"}
    there = {
        layer: np.isin(
            np.arange(128), [dim for dims in dims_named(dims_name(text)) for dim in dims]
        )
        for layer, text in masks.items()
    }
    rows = {layer: host.capture(source).array(layer, "z")[3] for layer in masks}
    model: Path = request.getfixturevalue("llama" if way == "v1" else "qwen3")
    wanted = InsideReference(model).rows(
        prompt_of(12),
        *(
            Edit(layer, rows[layer], [7], hook="z", op="replace", mask=there[layer])
            for layer in masks
        ),
    )
    assert (
        relative_error(host.capture(job).array(3, "post_block"), wanted["post_block", 3])
        <= FP32_ROWS
    )


@pytest.mark.slow("requests preempt one another")
def test_preempted_requests_are_patched_where_they_were_and_nowhere_else(
    cached: Host, reference: Reference
) -> None:
    """Seven blocks for six requests of up to three: what was patched is computed again, and patched
    again.
    """
    key, rows = source_of(cached, prompt_of(110, seed=98))
    before = cached.call("midstream_status")[0]["preemptions"]
    vector = np.random.default_rng(5).normal(size=HIDDEN).astype(np.float32)
    cells = [Cell("post_attn", 1, 3), Cell("post_attn", 1, 100, 7)]
    jobs = [
        cached.job(
            prompt_of(110, seed=400 + number),
            max_tokens=180,
            capture=capture_of(ALL, "all"),
            steering=[
                *patches(key, cells),
                patch(cached.vector(vector), "mlp_out", [2], "all_generated"),
            ]
            if number % 2
            else None,
        )
        for number in range(6)
    ]
    answers = cached.run_together(*jobs)
    assert cached.call("midstream_status")[0]["preemptions"] > before
    wanted = [*edits(cells, rows), Edit(2, vector, list(range(110, 289)), "mlp_out", "replace")]
    for number, job in enumerate(jobs):
        check_rows(cached, reference, job, answers[job.id], wanted if number % 2 else [])


# --- Beside global and own steering ---------------------------------------------------------------


#: docs/steering.md, "In which order"; of one kind: global, patch, the request's own steering.
ORDER = ("replace", "lowrank", "add", "add_matched", "ablate", "clamp")
PROMPT = 9
MASK = np.arange(HIDDEN) % 3 == 0


def ops(seed: int) -> dict[str, Edit]:
    """Op → an edit of layer 1; with another seed of other vectors, so that the order shows."""
    rng = np.random.default_rng(seed)
    v = rng.normal(size=(6, HIDDEN)).astype(np.float32)
    rotation = np.linalg.qr(rng.normal(size=(HIDDEN, 3)))[0].T.astype(np.float32)
    weight = (rng.normal(size=(3, HIDDEN)) / 8).astype(np.float32)
    bias = rng.normal(size=3).astype(np.float32)
    return {
        "replace": Edit(1, v[0], op="replace", alpha=0.6, scale=2.0),
        "lowrank": Edit(
            1, op="lowrank", rotation=rotation, weight=weight, bias=bias, strength=0.75
        ),
        "add": Edit(1, v[1], op="add", scale=1.5),
        "add_matched": Edit(1, v[2], op="add", scale=0.4, norm_match=True),
        "ablate": Edit(1, v[3], op="ablate"),
        "clamp": Edit(1, v[4], op="clamp", low=2.0, high=3.0),
        "patch": Edit(1, v[5], op="replace"),
        "partial patch": Edit(1, v[5], op="replace", alpha=0.5),
        "masked patch": Edit(1, v[5], op="replace", mask=MASK),
    }


def stored(host: Host, op: str, edit: Edit) -> list[StoredSteering]:
    """As the API stores it."""
    if "patch" not in op:
        return host.steering(edit)
    assert edit.vector is not None
    mask = "" if edit.mask is None else host.vector(edit.mask)
    return [patch(host.vector(edit.vector), "post_block", [1], "all", edit.alpha, mask)]


def in_order(*edits: tuple[str, Edit]) -> list[Edit]:
    """`edits`: (op, edit), those of everyone first, then patches, then the request's steering."""
    return [
        edit
        for _, edit in sorted(
            edits, key=lambda item: ORDER.index("replace" if "patch" in item[0] else item[0])
        )
    ]


def check(
    host: Host,
    reference: Reference,
    wanted: dict[str, tuple[list[StoredSteering], list[Edit]]],
    everyone: GlobalSteering,
) -> None:
    """Name → (a request's entries, the reference's edits): every row after the edits is the
    reference's.
    """
    capture = capture_of([1, 3], "all", at="after")
    jobs = {
        name: host.job(prompt_of(PROMPT), max_tokens=2, capture=capture, steering=steering)
        for name, (steering, _) in wanted.items()
    }
    answer = host.run_any(*jobs.values(), everyone=everyone)
    assert not answer.errors, answer.errors
    for name, job in jobs.items():
        check_rows(host, reference, job, answer.outputs[job.id], wanted[name][1])


@pytest.mark.parametrize("op", ["replace", "clamp"])
def test_request_and_global_ops_apply_in_the_documented_order(
    v1: Host, reference: Reference, op: str
) -> None:
    theirs = ops(1)[op]
    mine = ops(2)
    wanted = {
        name: (stored(v1, name, edit), in_order((op, theirs), (name, edit)))
        for name, edit in mine.items()
    }
    check(v1, reference, wanted, for_everyone(1, *v1.steering(theirs)))


def test_patches_apply_between_global_and_request_steering(v1: Host, reference: Reference) -> None:
    theirs = ops(1)["replace"]
    patched = ops(2)
    own = ops(3)["replace"]
    wanted = {}
    for name in ("patch", "partial patch", "masked patch"):
        entries = [*stored(v1, name, patched[name]), *stored(v1, "replace", own)]
        wanted[name] = entries, [theirs, patched[name], own]
    check(v1, reference, wanted, for_everyone(1, *v1.steering(theirs)))
    other_way = reference.rows(prompt_of(PROMPT), [patched["patch"], theirs, own], "after")[
        "post_block", 1
    ]
    right = reference.rows(prompt_of(PROMPT), [theirs, patched["patch"], own], "after")[
        "post_block", 1
    ]
    assert relative_error(other_way, right) > 0.1, "the order matters here"
