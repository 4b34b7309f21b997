"""With every drafter, tokens, rows, edits and receipts are those of a request without drafts.

fp32.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from draft_heads import AUX_LAYERS, eagle3_head, echo_target, glm4_moe, mimo
from host import Host, capture_of, prompt_of, relative_error, steer
from inside_reference import InsideReference
from mixed_kit import SAMPLED, check_mixed
from nursery import Nursery
from probe_kit import Weights, new_maximum, scores_of, tokens_of
from reference import Edit, Reference
from rows_kit import check_rows
from size_kit import both_sides, check_sizes
from test_early_exit import skipped
from test_inside import check_together
from test_reentry import EVERY, ask, base_run, cell, graded, logprobs_of, truth
from tiny import HIDDEN, LAYERS
from tolerances import FP32_LOGPROBS, FP32_ROWS

from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.jobs.jobs import Job, Output
from midstream.schemas.prompts.selectors import HOOKS, PositionWindow
from midstream.schemas.requests.specs import Grade
from midstream.schemas.settings.settings import Settings
from midstream.schemas.settings.vllm_options import VllmOptions
from midstream.workers.engine.vllm import VllmEngine

ALL = list(range(LAYERS))
EVERYTHING = capture_of([], "all", sites={hook: ALL for hook in HOOKS})
DRAFTS = 3
#: Drafter, and for MTP the model → what makes the target.
TARGETS: dict[str, Callable[[Path], Path]] = {
    "ngram": echo_target,
    "eagle3": echo_target,
    "mtp-mimo": mimo,
    "mtp-glm4-moe": glm4_moe,
}
#: One is no row of the matrix.
MARKS = {("v1", "eagle3"): pytest.mark.long}
WAYS = [
    pytest.param(way, id="-".join(way), marks=MARKS.get(way, pytest.mark.matrix))
    for way in [
        *((runner, name) for runner in ("v1", "v2") for name in TARGETS),
        ("compiled", "eagle3"),
    ]
]


class Drafting(NamedTuple):
    host: Host
    reference: Reference
    target: Path
    drafter: str
    runner: str
    aux: Path  # what an EAGLE-3 head was given, a file for each time


@pytest.fixture(scope="module", params=WAYS)
def drafting(
    request: pytest.FixtureRequest,
    nurseries: Callable[[str], Nursery],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Drafting]:
    runner, name = request.param
    folder = tmp_path_factory.mktemp("-".join(request.param))
    drafter = name.partition("-")[0]
    target = TARGETS[name](folder / "target")
    head = {"draft_model": str(eagle3_head(folder / "head", target))} if drafter == "eagle3" else {}
    (folder / "aux").mkdir()
    host = nurseries("v2" if runner == "v2" else "v1").host(
        folder / "engine",
        target,
        {"KEEP_AUX": str(folder / "aux")},
        runner="v2" if runner == "v2" else "v1",
        **{
            "engine.enforce_eager": runner != "compiled",
            "engine.max_model_len": 256,
            "engine.max_num_seqs": 8,
            "engine.max_num_batched_tokens": 64,
            "engine.block_size": 32,
        },
        speculative_tokens=DRAFTS,
        drafter=drafter,
        hooks="all,inside",
        **head,
    )
    yield Drafting(host, Reference(target), target, drafter, runner, folder / "aux")
    host.close()


def prompt(seed: int) -> list[int]:
    """It repeats itself, so that n-grams are found."""
    return prompt_of(12, seed=seed) * 3


def vector(seed: int, size: float = 1.0) -> np.ndarray:
    return size * np.random.default_rng(seed).normal(size=HIDDEN).astype(np.float32)


def counted(host: Host, *jobs: Job) -> tuple[dict[str, Output], int, int]:
    """Job → its output; steps and token rows of all."""
    before = host.call("midstream_status")[0]
    outputs = {job: output for job, (output,) in host.run(*jobs).items()}
    after = host.call("midstream_status")[0]
    return outputs, after["step"] - before["step"], after["token_rows"] - before["token_rows"]


def check(drafting: Drafting, job: Job, output: Output, edits: list[Edit]) -> None:
    """Each token is what the model says after those before it, and each row of those that were fed
    is there once.
    """
    host = drafting.host
    reference = drafting.reference
    check_rows(host, reference, job, [output], edits)
    start = len(job.prompts[0].token_ids) - 1
    fed = len(job.prompts[0].token_ids + output.token_ids)
    assert output.token_ids == np.argmax(reference.logits[start:], axis=-1).tolist()
    (receipt,) = host.receipts(job)
    edited = sum(
        fed - 1 if edit.positions is None else sum(place < fed - 1 for place in edit.positions)
        for edit in edits
    )
    assert receipt.status == "ok"
    assert receipt.message == ""
    assert receipt.applied == edited


def test_tokens_rows_and_edits_are_those_without_drafts(drafting: Drafting) -> None:
    host = drafting.host
    wanted: dict[str, list[Edit]] = {}

    def job(seed: int, *edits: Edit, **options: Any) -> Job:
        made = host.job(
            prompt(seed),
            max_tokens=24,
            capture=EVERYTHING,
            steering=host.steering(*edits),
            **options,
        )
        wanted[made.id] = list(edits)
        return made

    generated = list(range(36, 59))
    jobs = [
        *(job(seed) for seed in range(4)),
        job(4, Edit(1, vector(1, 2.0))),
        job(5, Edit(1, vector(2, 2.0), generated, "pre_attn")),
        job(
            6,
            Edit(2, vector(3), [37, 41, 42, 43], "mlp_out", "replace"),
            Edit(0, vector(4), [3, 40], "mlp_in"),
        ),
        job(
            7,
            Edit(3, vector(5, 3.0), generated, "post_block"),
            Edit(0, vector(6), None, "attn_out"),
        ),
    ]
    outputs, _, rows = counted(host, *jobs)
    for each in jobs:
        check(drafting, each, outputs[each.id], wanted[each.id])
    fed = len(jobs) * (36 + 24 - 1)
    assert rows > fed + 8, "so many rows more were computed for drafts that were rejected"
    assert rows < len(jobs) * 36 + (DRAFTS + 1) * 23 * len(jobs) * 0.8, "drafts were accepted"


def test_sampled_requests_leave_greedy_ones_in_the_same_steps_alone(drafting: Drafting) -> None:
    # Triton's interpreter, in which v2 runs here, cannot run vLLM's kernel for top-k and top-p.
    ways = SAMPLED[:1] if drafting.runner == "v2" else SAMPLED
    check_mixed(drafting.host, drafting.reference, ways)


def test_rows_edits_and_patterns_inside_are_those_without_drafts(drafting: Drafting) -> None:
    check_together(
        drafting.host,
        InsideReference(drafting.target),
        [prompt(60 + number) for number in range(8)],
        max_tokens=20,
    )


def test_a_drafter_reads_the_edited_model_and_is_not_edited_itself(drafting: Drafting) -> None:
    """An edit of what leaves the last layer decides every token, and a head that reads that stream
    drafts the same.
    """
    host = drafting.host
    deciding = Edit(LAYERS - 1, vector(8, 20.0), None, "post_block", "replace")
    job = host.job(
        prompt_of(30, seed=20), max_tokens=33, capture=EVERYTHING, steering=host.steering(deciding)
    )
    outputs, steps, _ = counted(host, job)
    assert len(set(outputs[job.id].token_ids)) == 1
    check(drafting, job, outputs[job.id], [deciding])
    right = (
        DRAFTS if "mtp" not in drafting.drafter else 1
    )  # its further drafts come from its own rows, and may differ
    assert steps <= 1 + 33 // (right + 1) + 4, "nearly all drafts were accepted"


def test_a_request_ends_where_it_ends_without_drafts(drafting: Drafting) -> None:
    """At its last token, at a stop token and at a stop string, wherever among accepted drafts that
    is.
    """
    host = drafting.host
    whole = host.job(prompt(1), max_tokens=30)
    (output,) = host.run(whole)[whole.id]
    tokens = output.token_ids
    space = " " if " " in output.text else ""
    ends: dict[str, tuple[Job, int]] = {}
    for length in range(2, 14):
        options: list[dict[str, Any]] = [{"max_tokens": length}]
        if tokens.index(tokens[length - 1]) == length - 1:
            options.append({"max_tokens": 30, "stop_token_ids": [tokens[length - 1]]})
        words = [f"{space}w{token}" for token in tokens]
        stop = "".join(words[length - 2 : length])
        if "".join(words).find(stop) + len(stop) == len("".join(words[:length])):
            options.append({"max_tokens": 30, "stop": [stop]})
        for option in options:
            job = host.job(prompt(1), capture=EVERYTHING, **option)
            ends[job.id] = job, length
    assert len(ends) > 12
    found = host.run(*(job for job, _ in ends.values()))
    for job, length in ends.values():
        assert found[job.id][0].token_ids == tokens[:length], job.sampling
        check(drafting, job, found[job.id][0], [])


@pytest.mark.matrix  # vLLM compiles what ranks them: 20 s
def test_log_probabilities_of_accepted_tokens_are_the_models(drafting: Drafting) -> None:
    host = drafting.host
    job = host.job(prompt(2), max_tokens=20, logprobs=4)
    (output,) = host.run(job)[job.id]
    drafting.reference.rows(prompt(2) + output.token_ids)
    right = logprobs_of(drafting.reference.logits)[35:-1]
    assert output.logprobs is not None
    assert [said.token_id for said in output.logprobs] == output.token_ids
    for said, of_step in zip(output.logprobs, right, strict=True):
        assert abs(said.logprob - of_step[said.token_id]) <= FP32_LOGPROBS
        assert {each.token_id for each in said.top[:4]} == set(np.argsort(of_step)[-4:].tolist())


def test_cached_prompts_and_kept_rows_stay_right(drafting: Drafting) -> None:
    """The second request is served blocks and rows of the first, the third, edited behind them,
    blocks.
    """
    host = drafting.host
    long = prompt_of(110, seed=40)
    edit = Edit(1, vector(9, 2.0), [100, 111, 112], "pre_attn")
    jobs = [
        host.job(long, max_tokens=12, capture=EVERYTHING),
        host.job(long, max_tokens=12, capture=EVERYTHING),
        host.job(long, max_tokens=12, steering=host.steering(edit)),
        host.job(long, max_tokens=12, capture=EVERYTHING, steering=host.steering(edit)),
    ]
    for number, job in enumerate(jobs):
        (output,) = host.run(job)[job.id]
        #: A head must see the last token of what is served: vLLM gives it one block less.
        blocks = 3 if drafting.drafter == "ngram" else 2
        assert output.cached_tokens == (0 if number == 0 else 32 * blocks)
        if number != 2:
            check(drafting, job, output, [edit] if number == 3 else [])


def test_prompts_without_tokens_end_early_beside_drafts(drafting: Drafting) -> None:
    """In steps of their own, of which a head gets no stream of the layers above. Blocks of such a
    prompt serve none that is drafted for.
    """
    host = drafting.host
    others = [host.job(prompt(70 + seed), max_tokens=24, capture=EVERYTHING) for seed in range(3)]
    prompts = [prompt_of(70, seed=80 + seed) for seed in range(4)]
    short = [
        host.job(*prompts, max_tokens=0, capture=capture_of([depth], "all_prompt"))
        for depth in range(2)
    ]
    before = skipped(host)
    outputs = host.run(*others, *short)
    assert (skipped(host) > before) == host.info["exits"]
    for job in short:
        assert [output.token_ids for output in outputs[job.id]] == [[]] * len(prompts)
        check_rows(host, drafting.reference, job, outputs[job.id])
    later = [host.job(tokens, max_tokens=12, capture=EVERYTHING) for tokens in prompts]
    outputs |= host.run(*later)
    for job in (*others, *later):
        check(drafting, job, outputs[job.id][0], [])


def test_an_edit_that_overflows_fails_and_leaves_nothing_behind(drafting: Drafting) -> None:
    host = drafting.host
    huge = host.vector(np.full(HIDDEN, 3e38))
    first = host.job(prompt(9), max_tokens=12, capture=EVERYTHING)
    text = host.run(first)[first.id][0].token_ids
    attacks = [
        host.job(prompt(20 + n), max_tokens=24, steering=[steer(huge, [0, 1], positions=p)])
        for n, p in enumerate(("all", PositionWindow(40)))
    ]
    host.run(*attacks)
    for attack in attacks:
        assert [receipt.kind for receipt in host.receipts(attack)] == ["intervention_failed"]
    after = host.job(prompt(9), max_tokens=12, capture=EVERYTHING)
    (output,) = host.run(after)[after.id]
    assert output.token_ids == text
    check(drafting, after, output, [])


def test_cells_are_graded_by_their_last_token(drafting: Drafting) -> None:
    """Also where the forward begins above the first layer, and a head gets nothing of those
    below.
    """
    host = drafting.host
    reference = drafting.reference
    short = prompt_of(40, seed=42)
    key = base_run(host, short, blocks=True)
    edits = [
        Edit(layer, vector(17), [position], "post_block", "replace")
        for layer in (1, 3)
        for position in (39, 17)
    ]
    for options in ({"key": key}, {"base": key}, {}):
        found = ask(host, *(cell(host, short, edit) for edit in edits), together=True, **options)
        for edit, receipts in zip(edits, found.values(), strict=True):
            reference.rows(short, [edit])
            np.testing.assert_allclose(
                graded(receipts), logprobs_of(reference.logits[-1]), atol=FP32_LOGPROBS, rtol=0
            )
    job = host.job(short, max_tokens=2)
    host.run_any(job, grades={job.id: [Grade(EVERY)]})
    np.testing.assert_allclose(
        graded(host.receipts(job)), truth(reference, short), atol=FP32_LOGPROBS, rtol=0
    )


def test_what_an_eagle3_head_reads_are_our_rows(drafting: Drafting) -> None:
    """vLLM keeps the stream between layers for the head: what leaves one layer, after our edits,
    before those of the next.
    """
    if drafting.drafter != "eagle3":
        pytest.skip("only an EAGLE-3 head reads the stream between layers")
    host = drafting.host
    for file in drafting.aux.iterdir():
        file.unlink()
    edit = Edit(2, vector(11, 2.0), [5, 38, 41], "post_block")
    behind = Edit(3, vector(12, 2.0), [6, 39], "pre_attn")
    captures = [
        capture_of([], "all", tag="before", sites={"pre_attn": [1, 3], "post_block": [3]}),
        capture_of([3], "all", tag="next", hook="pre_attn"),
    ]
    job = host.job(
        prompt(50), max_tokens=16, capture=captures, steering=host.steering(edit, behind)
    )
    host.run(job)
    reader = host.capture(job)
    read: dict[int, np.ndarray] = {}
    for file in sorted(drafting.aux.iterdir()):
        with np.load(file) as saved:
            read |= dict(
                zip(saved["positions"].tolist(), saved["hidden"], strict=True)
            )  # a position is computed again after a rejection
    positions = [position for position in reader.positions(0) if position in read]
    assert positions == reader.positions(0)
    for number, (layer, hook) in enumerate([(1, "pre_attn"), (3, "pre_attn"), (3, "post_block")]):
        ours = reader.array(layer, hook)
        theirs = np.stack(
            [read[position][number * HIDDEN : (number + 1) * HIDDEN] for position in positions]
        )
        assert np.array_equal(ours, theirs), (AUX_LAYERS[number], relative_error(ours, theirs))


@pytest.mark.matrix
def test_two_ranks_agree_on_tokens_rows_and_receipts(two_ranks: None, tmp_path: Path) -> None:
    target = echo_target(tmp_path / "target")
    head = str(eagle3_head(tmp_path / "head", target))
    (tmp_path / "engine").mkdir()
    drafts = {"speculative_tokens": DRAFTS, "drafter": "eagle3", "draft_model": head}
    with closing(
        Host(
            tmp_path / "engine",
            target,
            **{"engine.tensor_parallel_size": 2, "engine.max_model_len": 256},
            **drafts,
        )
    ) as host:
        reference = Reference(target)
        edit = Edit(2, vector(3), [37, 41, 42, 43], "mlp_out", "replace")
        job = host.job(prompt(6), max_tokens=24, capture=EVERYTHING, steering=host.steering(edit))
        outputs, steps, _ = counted(host, job)
        check_rows(host, reference, job, outputs.values(), [edit])
        assert outputs[job.id].token_ids == np.argmax(reference.logits[35:], axis=-1).tolist()
        assert [receipt.status for receipt in host.receipts(job)] == ["ok", "ok"]
        assert (
            len(
                {
                    (receipt.checksum, receipt.actions, receipt.step)
                    for receipt in host.receipts(job)
                }
            )
            == 1
        )
        assert steps < 24, "drafts were accepted"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 1024}, "is of a model with vocab_size 1024, valid: 512"),
        pytest.param(
            {"target_hidden_size": 128},
            "is of a model with hidden_size 128, valid: 64",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_head_of_another_model_is_refused_before_the_engine_starts(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    target = echo_target(tmp_path / "target")
    head = eagle3_head(tmp_path / "head", target, **options)
    settings = Settings(
        model=str(target),
        data_dir=str(tmp_path),
        vllm=VllmOptions(dtype="float32"),
        speculative_tokens=2,
        drafter="eagle3",
        draft_model=str(head),
    )
    with pytest.raises(MidstreamError, match=message):
        asyncio.run(VllmEngine(settings).start())


@pytest.mark.matrix
def test_a_head_that_reads_layers_that_are_not_there_is_refused_when_it_is_loaded(
    nursery: Nursery, tmp_path: Path
) -> None:
    target = echo_target(tmp_path / "target")
    head = eagle3_head(tmp_path / "head", target, eagle_aux_hidden_state_layer_ids=[1, 3, 9])
    with pytest.raises(
        AssertionError,
        match=r"the drafter reads the stream after layers \(1, 3, 9\), valid: 0 to 4",
    ):
        nursery.host(
            tmp_path / "engine",
            target,
            speculative_tokens=2,
            drafter="eagle3",
            draft_model=str(head),
        )


# --- Drafts of n-grams: v1 runner, fp32 -----------------------------------------------------------


@pytest.fixture(scope="module")
def speculating(
    llama: Path, nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Host]:
    host = nursery.host(
        tmp_path_factory.mktemp("speculating") / "engine",
        llama,
        speculative_tokens=3,
        hooks="all,inside",
    )
    yield host
    host.close()


@pytest.mark.long
def test_rows_of_rejected_drafts_never_appear_and_accepted_ones_are_right(
    speculating: Host, reference: Reference
) -> None:
    # field case 7
    """Prompts that repeat themselves, so that drafts are made; a random model rejects most of
    them.
    """
    vector = np.random.default_rng(4).normal(size=HIDDEN).astype(np.float32)
    name = speculating.vector(vector)
    plain = [
        speculating.job(prompt_of(12, seed=n) * 3, max_tokens=24, capture=capture_of(ALL, "all"))
        for n in range(6)
    ]
    steered = speculating.job(
        prompt_of(10) * 3,
        max_tokens=24,
        capture=capture_of(ALL, "all"),
        steering=[steer(name, [1], 2.0)],
    )
    before = speculating.call("midstream_status")[0]["token_rows"]
    answers = speculating.run(*plain, steered)
    computed = speculating.call("midstream_status")[0]["token_rows"] - before
    for job in (*plain, steered):
        edits = [(1, 2.0 * vector, None)] if job.id == steered.id else []
        check_rows(speculating, reference, job, answers[job.id], edits)
    (sizes,) = speculating.receipts(steered)[0].sizes
    assert sizes.rows == len(steered.prompts[0].token_ids) + 24 - 1, "rows of drafts count"
    fed = sum(len(job.prompts[0].token_ids) + 24 - 1 for job in (*plain, steered))
    assert computed > fed + 20  # so many rows more were computed for drafts that were rejected


@pytest.mark.long
def test_sizes_and_limits_hold_among_drafts(speculating: Host) -> None:
    vector = speculating.vector(np.random.default_rng(4).normal(size=HIDDEN).astype(np.float32))
    job, failed = (
        speculating.job(
            prompt_of(10) * 3,
            max_tokens=24,
            capture=both_sides([1]),
            steering=[steer(vector, [1], 5.0, "all_generated", limit=limit)],
        )
        for limit in (0.5, -0.5)
    )
    speculating.run_any(job, failed)
    (largest,) = check_sizes(speculating, job, [1], range(30, 53))
    assert 0.49 < largest <= 0.5
    assert speculating.receipts(failed)[0].kind == "edit_too_large"
    assert "position 30 is" in speculating.receipts(failed)[0].message


@pytest.mark.long
def test_prompts_cached_up_to_their_last_token_are_graded_by_its_row(
    speculating: Host, reference: Reference
) -> None:
    """vLLM computes that token with placeholder drafts behind it."""
    prompt = prompt_of(257, seed=41)
    right = truth(reference, prompt)
    for hit in (0, 256):
        job = speculating.job(
            prompt, max_tokens=2, capture=capture_of(ALL, "last_prompt") if hit else None
        )
        before = speculating.call("midstream_status")[0]["token_rows"]
        answer = speculating.run_any(job, grades={job.id: [Grade(EVERY)]})
        assert answer.outputs[job.id][0].cached_tokens == hit
        (receipt,) = speculating.receipts(job)
        assert receipt.status == "ok"
        assert receipt.message == ""
        np.testing.assert_allclose(receipt.graded, right, atol=FP32_LOGPROBS, rtol=0)
    assert speculating.call("midstream_status")[0]["token_rows"] - before >= 4, (
        "the last token was computed without drafts"
    )
    assert (
        relative_error(speculating.capture(job).array(2), reference.post_block(prompt)[2][-1:])
        <= FP32_ROWS
    )


@pytest.mark.long
def test_a_probe_ends_a_request_among_its_drafts(speculating: Host) -> None:
    """Accepted drafts up to the token that crosses are returned; rows of rejected ones decide
    nothing.
    """
    for seed in range(3):
        weights = Weights(100 + seed, k=16)
        prompt = prompt_of(12, seed=seed) * 3
        free = speculating.job(
            prompt, max_tokens=24, probes=[weights.probe(speculating, LAYERS - 1)]
        )
        tokens = speculating.run(free)[free.id][0].token_ids
        scores = tokens_of(scores_of(speculating, free)["p"])
        assert len(scores) == 36 + 23
        label, position, threshold = new_maximum(scores, 38, 58)
        thresholds = [threshold if number == label else None for number in range(16)]
        probe = weights.probe(speculating, LAYERS - 1, "stop", thresholds=thresholds)
        job = speculating.job(
            prompt, max_tokens=24, probes=[probe], capture=capture_of([LAYERS - 1], "all")
        )
        (output,) = speculating.run(job)[job.id]
        assert output.finish_reason == "probe:p"
        assert output.token_ids == tokens[: position - 36 + 1]
        assert speculating.capture(job).positions(0) == list(range(position + 1))
        assert scores_of(speculating, job)["p"].crossed[label] == position
