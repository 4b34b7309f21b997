"""A patched row is the source's row, and nothing else of the batch is touched. Tiny Llama, fp32."""

import numpy as np
import pytest
from host import Host, prompt_of
from patching_kit import ALL, Cell, everything, patched_batch, patches, rows_of
from reference import Reference

from midstream.schemas.jobs.jobs import Job
from midstream.schemas.prompts.selectors import HOOKS, STREAM_HOOKS
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
