"""A patched row is the source's row, and nothing else of the batch is touched. Tiny Llama, fp32."""

import numpy as np
import pytest
from host import Host, prompt_of
from patching_kit import ALL, Cell, everything, in_one_step, patch, patched_batch, patches, rows_of
from reference import Edit, Reference

from midstream.schemas.jobs.jobs import Job
from midstream.schemas.prompts.selectors import HOOKS, STREAM_HOOKS, Window
from midstream.schemas.requests.specs import Grade, StoredSteering

CLEAN, CORRUPT = prompt_of(24, seed=71), prompt_of(24, seed=72)


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


@pytest.mark.parametrize("hook", sorted(STREAM_HOOKS))
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


def test_patches_change_only_downstream_rows(tp2: Host) -> None:
    """Twenty requests in one step of two ranks, every other one patched, and the same again with no
    patch: bit for bit.
    """
    clean, (hook, layer, position) = ran(tp2, CLEAN), ("post_attn", 1, 6)
    key, source = tp2.keep(clean), rows_of(tp2, clean)
    prompts = [prompt_of(10 + number, seed=300 + number) for number in range(20)]
    batches = []
    for patched in (False, True):
        jobs = [
            tp2.job(
                prompt,
                max_tokens=1,
                capture=everything(),
                steering=patches(key, [Cell(hook, layer, position, number)])
                if patched and number % 2
                else None,
            )
            for number, prompt in enumerate(prompts)
        ]
        tp2.run_together(*jobs)
        in_one_step(tp2, jobs)
        batches.append([rows_of(tp2, job) for job in jobs])
    for number, (plain, patched) in enumerate(zip(*batches, strict=True)):
        if number % 2 == 0:
            assert same(plain, patched), number
            continue
        for (at, of), values in patched.items():
            before = (of, list(everything().sites).index(at)) <= (
                layer,
                list(everything().sites).index(hook),
            )
            same_rows = [
                place
                for place in range(len(values))
                if np.array_equal(values[place], plain[at, of][place])
            ]
            assert same_rows[:position] == list(range(position)), "no token looks ahead"
            assert (len(same_rows) == len(values)) == before, (number, at, of)
        # What it became shows in what is added to it next: the stream behind the MLP, less the MLP.
        stream = patched["post_block", layer][position] - patched["mlp_out", layer][position]
        np.testing.assert_allclose(stream, source[hook, layer][number], rtol=1e-5, atol=1e-5)


def test_generated_positions_are_patched(cached: Host, reference: Reference, clean: Job) -> None:
    """A range beyond the prompt's end, and everything that is generated; each is fed back and seen
    by the next.
    """
    (row,) = patches(cached.keep(clean), [Cell("post_block", 1, 4)])
    vector = rows_of(cached, clean)["post_block", 1][4]
    for positions, where in (
        (Window(start=25, stop=28), [25, 26, 27]),
        ("all_generated", list(range(24, 31))),
    ):
        job = ran(
            cached,
            CORRUPT,
            [patch(row.tensors[0], "post_block", [1], positions)],
            max_tokens=8,
            at="after",
        )
        tokens = CORRUPT + [int(token) for token in cached.capture(job).token_ids()[24:]]
        wanted = reference.rows(tokens, [Edit(1, vector, where, "post_block", "replace")], "after")
        for site, values in rows_of(cached, job).items():
            np.testing.assert_allclose(values, wanted[site], rtol=1e-3, atol=1e-4)
        assert all(
            np.array_equal(rows_of(cached, job)["post_block", 1][place], vector) for place in where
        )
        assert cached.receipts(job)[0].applied == len(where)


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
    made = patched_batch(host, reference, longest=80 if way == "v2" else 100)
    for job, wanted in made:
        for receipt in host.receipts(job):
            mine = [
                edit for edit in wanted if way != "pp2" or (edit.layer >= 2) == bool(receipt.pp)
            ]
            assert (receipt.applied > 0) == bool(mine), (way, receipt)
