"""A patched row is the source's row, and nothing else of the batch is touched. Tiny Llama, fp32."""

import numpy as np
import pytest
from host import Host, prompt_of
from patching_kit import ALL, Cell, everything, in_one_step, patch, patched_batch, patches, rows_of
from reference import Edit, Reference
from tiny import HIDDEN
from tolerances import FP32_LERP

from midstream.schemas.jobs.jobs import Job
from midstream.schemas.prompts.selectors import STREAM_HOOKS, Window
from midstream.schemas.requests.source_runs import ZEROS, RunRow, row_name
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


@pytest.mark.parametrize(
    "hook", ["pre_attn", "attn_out", "post_attn", "mlp_in", "mlp_out", "post_block"]
)
def test_patching_with_alpha_zero_or_its_own_row_is_bit_exact(
    cached: Host, clean: Job, corrupt: Job, hook
) -> None:
    cells = [Cell(hook, layer, position) for layer in ALL for position in (0, 3, 23)]
    plain = rows_of(cached, corrupt)
    assert same(
        rows_of(cached, ran(cached, CORRUPT, patches(cached.keep(clean), cells, alpha=0.0))), plain
    )
    assert same(rows_of(cached, ran(cached, CORRUPT, patches(cached.keep(corrupt), cells))), plain)


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
        for each in ("pre_attn", "attn_out", "post_attn", "mlp_in", "mlp_out", "post_block"):
            assert np.array_equal(
                graded["patched"][1][each, layer], graded["clean"][1][each, layer]
            ), (each, layer)


@pytest.mark.parametrize(
    "hook", ["pre_attn", "attn_out", "post_attn", "mlp_in", "mlp_out", "post_block"]
)
def test_alpha_interpolates_linearly(cached: Host, clean: Job, corrupt: Job, hook) -> None:
    """Each in float64 from the rows as captured; with 1 the source's row bit for bit."""
    cell, key = Cell(hook, 2, 11, 7), cached.keep(clean)
    h, t = (
        rows_of(cached, job)[hook, 2][position].astype(np.float64)
        for job, position in ((corrupt, 11), (clean, 7))
    )
    shares = []
    for alpha in (0.0, 0.1, 0.5, 0.9, 1.0):
        got = rows_of(cached, ran(cached, CORRUPT, patches(key, [cell], alpha), at="after"))[
            hook, 2
        ][11]
        np.testing.assert_allclose(
            got, (1 - alpha) * h + alpha * t, rtol=FP32_LERP, atol=FP32_LERP * np.abs(t).max()
        )
        shares.append(float((got - h) @ (t - h)))
    assert np.array_equal(got, t.astype(np.float32))
    assert shares == sorted(shares)
    assert len(set(shares)) == len(shares)


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


def test_only_the_dimensions_of_the_mask_are_written(
    cached: Host, clean: Job, corrupt: Job
) -> None:
    mask = np.zeros(HIDDEN, dtype=np.float32)
    mask[[0, 7, 8, 9, 63]] = 1
    (row,) = patches(cached.keep(clean), [Cell("post_block", 1, 4)])
    for alpha in (1.0, 0.5):
        entry = patch(row.tensors[0], "post_block", [1], [4], alpha, cached.vector(mask))
        got = rows_of(cached, ran(cached, CORRUPT, [entry], at="after"))["post_block", 1]
        h, t = (rows_of(cached, job)["post_block", 1] for job in (corrupt, clean))
        assert np.array_equal(got[4][mask == 0], h[4][mask == 0])
        np.testing.assert_allclose(
            got[4][mask == 1], ((1 - alpha) * h[4] + alpha * t[4])[mask == 1], rtol=FP32_LERP
        )
        assert np.array_equal(np.delete(got, 4, 0), np.delete(h, 4, 0))


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


def test_zero_and_mean_patches_match_the_reference(cached: Host, clean: Job) -> None:
    mean = row_name(RunRow(cached.keep(clean), "pre_attn", 2, None, (1, 2, 5)))
    job = ran(
        cached,
        CORRUPT,
        [patch(ZEROS, "pre_attn", [1], [8]), patch(mean, "pre_attn", [2], [9])],
        at="after",
    )
    got, source = rows_of(cached, job), rows_of(cached, clean)
    assert not got["pre_attn", 1][8].any()
    np.testing.assert_allclose(
        got["pre_attn", 2][9], source["pre_attn", 2][[1, 2, 5]].mean(0), rtol=1e-6, atol=1e-6
    )


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
