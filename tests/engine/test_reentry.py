"""What the ranks say of the next token is the model's own log-softmax, whoever else is in the
batch, and of cells whose forward begins at the layer that they patch. fp32.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from host import Host, capture_of, prompt_of, steer
from reference import Edit, Reference
from tiny import HIDDEN, LAYERS, VOCABULARY
from tolerances import FP32_ENTERED, FP32_LOGPROBS
from wait_kit import wait_until

from midstream.schemas.jobs.jobs import Job
from midstream.schemas.jobs.receipts import Receipt
from midstream.schemas.prompts.selectors import HOOKS, Hook
from midstream.schemas.requests.source_runs import run_key
from midstream.schemas.requests.specs import EntryPoint, Grade

EVERY = list(range(VOCABULARY))


def logprobs_of(logits: np.ndarray) -> np.ndarray:
    """float64 log-softmax."""
    exact = logits.astype(np.float64)
    exact -= exact.max(-1, keepdims=True)
    return exact - np.log(np.exp(exact).sum(-1, keepdims=True))


def truth(reference: Reference, token_ids: list[int]) -> np.ndarray:
    """Of the token after these: `[vocabulary]`."""
    reference.rows(token_ids)
    return logprobs_of(reference.logits[-1])


def grades_of(host: Host, *asked: tuple[Job, Grade], **options: Any) -> list[list[float]]:
    """One batch; what the last stage's first rank said of each."""
    answer = host.run_any(
        *(job for job, _ in asked), grades={job.id: [grade] for job, grade in asked}, **options
    )
    assert not answer.errors, answer.errors
    found = []
    for job, _ in asked:
        receipts = host.receipts(job)
        assert [(receipt.status, receipt.message) for receipt in receipts] == [("ok", "")] * len(
            receipts
        )
        (told,) = (receipt.graded for receipt in receipts if receipt.graded)
        found.append(told)
    return found


@pytest.mark.slow("vLLM compiles what ranks log-probabilities")
def test_log_probabilities_equal_transformers_and_neighbours_keep_theirs(
    v1: Host, reference: Reference
) -> None:
    """With vLLM's `logprob_token_ids` instead the neighbours would be told of other tokens."""
    prompts = [
        prompt_of(length, seed=length) for length in (9, 100, 20)
    ]  # one of them in two steps
    asked = [(v1.job(prompt, max_tokens=2), Grade(token_ids=EVERY)) for prompt in prompts]
    neighbours = [
        v1.job(prompt_of(length, seed=40 + length), max_tokens=3, logprobs=5) for length in (11, 21)
    ]
    answer = v1.run_any(
        *(job for job, _ in asked), *neighbours, grades={job.id: [grade] for job, grade in asked}
    )
    assert not answer.errors
    for prompt, (job, _) in zip(prompts, asked, strict=True):
        (receipt,) = v1.receipts(job)
        np.testing.assert_allclose(
            receipt.graded, truth(reference, prompt), atol=FP32_LOGPROBS, rtol=0
        )
    for job in neighbours:
        (output,) = answer.outputs[job.id]
        assert output.logprobs is not None
        tokens = list(job.prompts[0].token_ids)
        for said, token in zip(output.logprobs, output.token_ids, strict=True):
            right = truth(reference, tokens)
            assert {each.token_id for each in said.top[:5]} == set(np.argsort(right)[-5:].tolist())
            for each in said.top:
                assert abs(each.logprob - right[each.token_id]) <= FP32_LOGPROBS
            tokens.append(token)


def test_cached_prompts_are_graded_alike(cached: Host, reference: Reference) -> None:
    prompt = prompt_of(300, seed=84)
    right = truth(reference, prompt)
    for hit in (0, 256):
        job = cached.job(prompt, max_tokens=1)
        answer = cached.run_any(job, grades={job.id: [Grade(EVERY)]})
        assert answer.outputs[job.id][0].cached_tokens == hit
        np.testing.assert_allclose(
            cached.receipts(job)[0].graded, right, atol=FP32_LOGPROBS, rtol=0
        )


def test_preempted_requests_are_graded_once_and_right(cached: Host, reference: Reference) -> None:
    """Seven blocks of KV cache: they grow until they push one another out."""
    prompts = [prompt_of(100, seed=90 + number) for number in range(5)]
    before = cached.call("midstream_status")[0]["preemptions"]
    told = grades_of(
        cached,
        *((cached.job(prompt, max_tokens=60), Grade(EVERY)) for prompt in prompts),
        together=True,
    )
    assert cached.call("midstream_status")[0]["preemptions"] > before
    for prompt, values in zip(prompts, told, strict=True):
        np.testing.assert_allclose(values, truth(reference, prompt), atol=FP32_LOGPROBS, rtol=0)


@pytest.mark.parametrize(("way", "grader"), [("tp2", 0), ("pp2", 1), ("v2", 0), ("overlapped", 1)])
def test_one_rank_grades_and_all_ranks_confirm(
    request: pytest.FixtureRequest, way: str, grader: int
) -> None:
    """Two tensor-parallel ranks, two pipeline stages, the v2 runner; a steered request among
    them.
    """
    host: Host = request.getfixturevalue(way)
    reference = Reference(request.getfixturevalue("llama" if way == "v2" else "qwen3"))
    vector = np.random.default_rng(7).normal(size=HIDDEN).astype(np.float32)
    plain, steered = (
        host.job(prompt_of(9, seed=95), max_tokens=1, steering=steering)
        for steering in (None, [steer(host.vector(vector), [1])])
    )
    told = grades_of(host, (plain, Grade(EVERY, keep="plain")), (steered, Grade(EVERY)))
    assert [receipt.rank for receipt in host.receipts(plain) if receipt.graded] == [grader]
    right = truth(reference, prompt_of(9, seed=95))
    np.testing.assert_allclose(told[0], right, atol=FP32_LOGPROBS, rtol=0)
    reference.rows(prompt_of(9, seed=95), [(1, vector, None)])
    moved = logprobs_of(reference.logits[-1])
    np.testing.assert_allclose(told[1], moved, atol=FP32_LOGPROBS, rtol=0)
    assert np.abs(moved - right).max() > 100 * FP32_LOGPROBS


# --- Cells that enter the model above what they share ---------------------------------------------


VECTOR = np.random.default_rng(17).normal(size=HIDDEN).astype(np.float32)
BLOCK = 128


def base_run(host: Host, prompt: list[int], *, blocks: bool = False) -> str:
    """A source run of the prompt's stream before every layer but the first; with `blocks` its KV
    cache is kept as well.
    """
    job = host.job(
        prompt,
        max_tokens=1,
        capture=capture_of(list(range(1, LAYERS)), "all_prompt", tag="base", hook="pre_attn"),
    )
    answer = host.run_any(job, blocks={job.id: run_key(job.id, 0, "base")} if blocks else {})
    assert not answer.errors
    return host.keep(job)


def edit_of(layer: int, position: int, hook: Hook = "post_block") -> Edit:
    return Edit(layer, VECTOR, [position], hook, "replace")


def cell(host: Host, prompt: list[int], *edits: Edit) -> Job:
    return host.job(prompt, max_tokens=1, steering=host.steering(*edits))


def ask(
    host: Host,
    *cells: Job,
    key: str = "",
    base: str = "",
    beside: Job | None = None,
    **options: Any,
) -> dict[str, list[Receipt]]:
    """In one batch; with `key` each cell may begin at its lowest layer, with `base` behind that
    run's blocks. The last receipts of each.
    """
    options["bases"] = {job.id: base for job in cells if base}
    entries = {
        job.id: EntryPoint(key, min(entry.layers[0] for entry in job.steering[0]))
        for job in cells
        if key
    }
    jobs = cells if beside is None else (*cells, beside)
    wanted = {job.id: len(of_job(host, job)) + host.settings.vllm.ranks for job in cells}
    answer = host.run_any(
        *jobs, entries=entries, grades={job.id: [Grade(EVERY)] for job in cells}, **options
    )
    assert not answer.errors, answer.errors
    wait_until(
        lambda: all(len(of_job(host, job)) >= wanted[job.id] for job in cells),
        why="receipts are missing",
    )
    return {job.id: of_job(host, job)[-host.settings.vllm.ranks :] for job in cells}


def of_job(host: Host, job: Job) -> list[Receipt]:
    """All receipts so far, those of the same request asked again included; the latest last, by
    rank.
    """
    found = [receipt for receipt in host.all_receipts() if receipt.job == job.id]
    return sorted(found, key=lambda receipt: (receipt.step, receipt.rank))


def graded(receipts: list[Receipt]) -> np.ndarray:
    assert [(receipt.status, receipt.message) for receipt in receipts] == [("ok", "")] * len(
        receipts
    )
    return np.array(next(receipt.graded for receipt in receipts if receipt.graded))


def counting(host: Host) -> Callable[[], list[tuple[int, int]]]:
    """When called: of each rank, how many token rows it computed since, and how many of its layers
    it left out, times those rows.
    """

    def status() -> list[tuple[int, int]]:
        return [
            (rank["token_rows"], rank["skipped_rows"]) for rank in host.call("midstream_status")
        ]

    before = status()
    return lambda: [
        (rows - former, skipped - then)
        for (rows, skipped), (former, then) in zip(status(), before, strict=True)
    ]


def patched_truth(reference: Reference, prompt: list[int], *edits: Edit) -> np.ndarray:
    reference.rows(prompt, edits)
    return logprobs_of(reference.logits[-1])


@pytest.mark.parametrize("layer", [pytest.param(1, marks=pytest.mark.long), 3])
def test_reentry_equals_a_full_forward_at_every_hook(
    cached: Host, reference: Reference, layer: int
) -> None:
    prompt = prompt_of(24, seed=61)
    key = base_run(cached, prompt)
    edits = [edit_of(layer, position, hook) for hook in HOOKS for position in (3, 23)]
    full = ask(cached, *(cell(cached, prompt, edit) for edit in edits))
    count = counting(cached)
    entered = ask(cached, *(cell(cached, prompt, edit) for edit in edits), key=key)
    assert count() == [(24 * len(edits), 24 * len(edits) * layer)]
    for edit, whole, short in zip(edits, full.values(), entered.values(), strict=True):
        np.testing.assert_allclose(graded(short), graded(whole), atol=FP32_ENTERED, rtol=0)
        np.testing.assert_allclose(
            graded(short), patched_truth(reference, prompt, edit), atol=FP32_LOGPROBS, rtol=0
        )
        assert short[0].applied == whole[0].applied == 1


def test_reentry_with_cached_blocks_starts_at_the_patched_token(
    cached: Host, reference: Reference
) -> None:
    """And where they had to make room it begins at the first, with the same result."""
    prompt = prompt_of(40, seed=70)
    key = base_run(cached, prompt, blocks=True)
    edits = [edit_of(layer, position) for layer in (1, 3) for position in (1, 17, 39)]
    for beside in (None, cached.job(prompt_of(400, seed=71), max_tokens=2)):
        count = counting(cached)
        # Together: all of them in flight take every block, and one that came when most had begun
        # would find that what was kept had to go.
        found = ask(
            cached,
            *(cell(cached, prompt, edit) for edit in edits),
            key=key,
            beside=beside,
            together=True,
        )
        if beside is None:
            assert count()[0][0] == 2 * (39 + 23 + 1)
        for edit, receipts in zip(edits, found.values(), strict=True):
            np.testing.assert_allclose(
                graded(receipts), patched_truth(reference, prompt, edit), atol=FP32_LOGPROBS, rtol=0
            )
            assert receipts[0].applied == 1
    # under the same name: nothing of the base is taken for it
    other = [prompt[0], *prompt_of(39, seed=74)]
    astray = cell(cached, other, edit_of(3, 17))
    count = counting(cached)
    cached.run_any(
        astray, entries={astray.id: EntryPoint(key, 0)}, grades={astray.id: [Grade(EVERY)]}
    )
    np.testing.assert_allclose(
        graded(cached.receipts(astray)),
        patched_truth(reference, other, edit_of(3, 17)),
        atol=FP32_LOGPROBS,
        rtol=0,
    )
    assert count()[0][0] == 40
    job = cached.job(prompt, max_tokens=1)
    cached.run_any(job, grades={job.id: [Grade(EVERY)]})
    np.testing.assert_allclose(
        graded(cached.receipts(job)), truth(reference, prompt), atol=FP32_LOGPROBS, rtol=0
    )


def test_a_step_with_an_ordinary_request_in_it_computes_all_layers(
    cached: Host, reference: Reference
) -> None:
    prompt = prompt_of(24, seed=61)
    beside = prompt_of(30, seed=62)
    key = base_run(cached, prompt)
    count = counting(cached)
    ordinary = cached.job(beside, max_tokens=1, capture=capture_of([3], "last_prompt"))
    found = ask(
        cached,
        *(cell(cached, prompt, edit_of(layer, 5)) for layer in (2, 3)),
        key=key,
        beside=ordinary,
        together=True,
    )
    ((_, skipped),) = count()
    assert skipped == 0
    for layer, receipts in zip((2, 3), found.values(), strict=True):
        np.testing.assert_allclose(
            graded(receipts),
            patched_truth(reference, prompt, edit_of(layer, 5)),
            atol=FP32_LOGPROBS,
            rtol=0,
        )
    row = cached.capture(ordinary).array(3)[0]
    np.testing.assert_allclose(row, reference.post_block(beside)[3][-1], rtol=1e-4, atol=1e-4)


def test_reentry_fills_shared_blocks_and_shares_none_of_its_own(
    cached: Host, reference: Reference
) -> None:
    """Not even the same cell again, as after a preemption: below its layer there is nothing in
    them.
    """
    prompt = prompt_of(300, seed=63)
    edit = edit_of(3, 200)
    wanted = patched_truth(reference, prompt, edit)
    plain = truth(reference, prompt)
    key = base_run(cached, prompt)
    for seed in (64, 65, 66):  # nothing of the prompt is left in the cache
        cached.run(cached.job(prompt_of(400, seed=seed), max_tokens=1))
    mine = cell(cached, prompt, edit)
    count = counting(cached)
    np.testing.assert_allclose(
        graded(ask(cached, mine, key=key)[mine.id]), wanted, atol=FP32_LOGPROBS, rtol=0
    )
    assert count() == [(300, 0)], "it had to fill the first block, which others share"
    again = cell(cached, prompt, edit)
    np.testing.assert_allclose(
        graded(ask(cached, again, key=key)[again.id]), wanted, atol=FP32_LOGPROBS, rtol=0
    )
    assert count() == [(300 + 300 - BLOCK, 3 * (300 - BLOCK))]
    # The same request with the same cache keys, and all layers computed.
    ordinary = cached.job(prompt_of(9), max_tokens=1)
    np.testing.assert_allclose(
        graded(ask(cached, again, key=key, beside=ordinary, together=True)[again.id]),
        wanted,
        atol=FP32_LOGPROBS,
        rtol=0,
    )
    for _ in range(2):
        job = cached.job(prompt, max_tokens=1)
        answer = cached.run_any(job, grades={job.id: [Grade(EVERY)]})
        assert answer.outputs[job.id][0].cached_tokens >= BLOCK
        np.testing.assert_allclose(graded(cached.receipts(job)), plain, atol=FP32_LOGPROBS, rtol=0)


def test_reentry_without_a_prefix_cache_fills_no_shared_blocks(
    v1: Host, reference: Reference
) -> None:
    prompt = prompt_of(60, seed=74)
    edit = edit_of(3, 50)
    key = base_run(v1, prompt)
    count = counting(v1)
    mine = cell(v1, prompt, edit)
    np.testing.assert_allclose(
        graded(ask(v1, mine, key=key)[mine.id]),
        patched_truth(reference, prompt, edit),
        atol=FP32_LOGPROBS,
        rtol=0,
    )
    assert count() == [(60, 3 * 60)]


#: (fixture, checkpoint, of each rank the layers below 3 that it holds)
WAYS = [
    ("tp2", "qwen3", (3, 3)),
    ("pp2", "qwen3", (2, 1)),
    ("v2", "llama", (3,)),
]


@pytest.mark.parametrize(("way", "checkpoint", "below"), WAYS)
def test_reentry_works_on_every_runner_rank_and_stage(
    request, way: str, checkpoint: str, below: tuple[int, ...]
) -> None:
    host = request.getfixturevalue(way)
    reference = Reference(request.getfixturevalue(checkpoint))
    prompt = prompt_of(10, seed=69)
    key = base_run(host, prompt)
    count = counting(host)
    edits = [edit_of(3, 5), edit_of(3, 9, "pre_attn")]
    found = ask(host, *(cell(host, prompt, edit) for edit in edits), key=key)
    assert count() == [(20, 20 * layers) for layers in below]
    for edit, receipts in zip(edits, found.values(), strict=True):
        np.testing.assert_allclose(
            graded(receipts), patched_truth(reference, prompt, edit), atol=FP32_LOGPROBS, rtol=0
        )


def test_compiled_cells_start_at_the_patched_token(compiled: Host, reference: Reference) -> None:
    """At the first layer, behind the blocks of their base: no layer is skipped there."""
    prompt = prompt_of(40, seed=80)
    key = base_run(compiled, prompt, blocks=True)
    sites: list[tuple[int, Hook]] = [(0, "pre_attn"), (1, "mlp_out"), (3, "post_block")]
    edits = [edit_of(layer, position, hook) for layer, hook in sites for position in (1, 17, 39)]
    count = counting(compiled)
    full = ask(compiled, *(cell(compiled, prompt, edit) for edit in edits))
    assert count() == [(40 * len(edits), 0)]
    count = counting(compiled)
    short = ask(compiled, *(cell(compiled, prompt, edit) for edit in edits), base=key)
    assert count() == [(3 * (39 + 23 + 1), 0)]
    for edit, whole, part in zip(edits, full.values(), short.values(), strict=True):
        np.testing.assert_allclose(graded(part), graded(whole), atol=FP32_LOGPROBS, rtol=0)
        np.testing.assert_allclose(
            graded(part), patched_truth(reference, prompt, edit), atol=FP32_LOGPROBS, rtol=0
        )
        assert part[0].applied == 1
    for _ in range(2):  # nothing of the cells is found by others
        job = compiled.job(prompt, max_tokens=1)
        compiled.run_any(job, grades={job.id: [Grade(EVERY)]})
        np.testing.assert_allclose(
            graded(compiled.receipts(job)), truth(reference, prompt), atol=FP32_LOGPROBS, rtol=0
        )
