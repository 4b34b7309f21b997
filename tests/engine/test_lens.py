"""The logit lens equals transformers': stream → final norm → output matrix → log-softmax, whatever
the engine does meanwhile.
"""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from families import CHANGED, checkpoint
from host import Host, capture_of, prompt_of, steer
from lens_kit import Truth, check, lens, lenses
from tiny import LAYERS

from midstream.api.resolve.edits.directions import DirectionFiles, check_directed
from midstream.schemas.artifacts.jacobian_lenses import JacobianFit, JacobianLensRequest
from midstream.schemas.jobs.models import ModelInfo
from midstream.schemas.requests.specs import SteeringSpec
from midstream.storage.formats.lens_files import Matrix, lens_of, write
from midstream_lab.gradients.jacobian import fit_jacobian_lens
from midstream_lab.gradients.points import Points

ALL = list(range(LAYERS))
NAMED = (7, 123, 499)


@pytest.fixture(scope="module")
def truth(llama: Path) -> Truth:
    return Truth(llama)


def test_lens_equals_transformers_in_chunks_and_beside_others(v1: Host, truth: Truth) -> None:
    """200 tokens in steps of 64, beside a steered, a captured and a short request; the last layer's
    first is the model's own token.
    """
    long = v1.job(prompt_of(200), max_tokens=4, capture=lens(ALL, "all", tokens=NAMED))
    short = v1.job(
        prompt_of(9, seed=3),
        max_tokens=3,
        capture=[capture_of(ALL, "all"), lens(ALL, "all", top_k=3)],
    )
    other = v1.job(
        prompt_of(20, seed=4), max_tokens=8, steering=[steer(v1.vector(np.ones(64)), [1], 3.0)]
    )
    outputs = v1.run(long, short, other)
    for job in (long, short):
        (reading,) = lenses(v1, job)
        tokens = job.prompts[0].token_ids + outputs[job.id][0].token_ids
        assert reading.positions == list(range(len(tokens) - 1))
        assert reading.token_ids == tokens[:-1]
        check(reading, truth.logprobs(tokens[:-1]))
        first = len(job.prompts[0].token_ids) - 1
        assert [row[0] for row in reading.top_tokens[-1][first:]] == outputs[job.id][0].token_ids
    assert v1.receipts(long)[0].files == [], "a reading stores no rows"


def test_named_tokens_and_parts_of_the_stream(v1: Host, truth: Truth) -> None:
    """A branch, before and after an edit: what the lens reads are the rows that a capture of the
    same place gets.
    """
    edit = [steer(v1.vector(np.ones(64)), [1], 2.0)]
    sites = {"post_block": [1]}
    captures = [
        capture_of([1], "all_prompt", at="after"),
        lens([], sites=sites, at="after"),
        lens([], sites=sites, tokens=NAMED),
        lens([], sites={"attn_out": [2]}),
    ]
    job = v1.job(prompt_of(12), max_tokens=1, steering=edit, capture=captures)
    v1.run(job)
    after, before, branch = lenses(v1, job)
    rows = torch.from_numpy(v1.capture(job).array(1, "post_block"))
    wanted = truth.head(truth.norm()(rows)).log_softmax(dim=-1).detach().numpy()
    check(after, {(1, position): wanted[position] for position in range(12)})  # type: ignore[arg-type]
    assert np.abs(np.array(after.top_logprobs) - np.array(before.top_logprobs)).max() > 0.01
    assert branch.hook == "attn_out"
    assert branch.layers == [2]
    assert np.isfinite(branch.top_logprobs).all()


def test_a_fitted_jacobian_lens_reads_and_edits_by_definition(v1: Host, truth: Truth) -> None:
    """A lens fitted on transformers' model: the ranks read W_U norm(J h), and an exchange of two
    tokens' coordinates in the same run changes rows as V (σ(c) − c) says.
    """
    corpus = [prompt_of(24, seed=seed) for seed in range(4)]
    jacobians, fit = fit_jacobian_lens(Points(truth.model), corpus, [0, 2], JacobianFit())
    head = truth.model.get_output_embeddings().weight.detach().numpy()
    folder = v1.settings.artifacts_of("lenses")
    write(
        Path(folder, "jacobian"),
        {layer: matrix.numpy() for layer, matrix in jacobians.items()},
        fit,
        Matrix(head),
    )
    model = msgspec.convert(v1.info, ModelInfo)
    root = v1.settings.artifacts_of("lenses")
    found = lens_of(JacobianLensRequest(path="jacobian"), "mine", model, root)
    spec = SteeringSpec(jacobian="mine", token=7, swap=123, layers=[2])
    (directed,) = check_directed([spec], {"mine": found}, model)
    plain = DirectionFiles(folder).plain_specs(directed, [7, 123])
    job = v1.job(
        prompt_of(12, seed=8),
        max_tokens=1,
        steering=v1.steering(*plain),
        capture=[
            capture_of(ALL, "all_prompt"),
            capture_of([2], "all_prompt", at="after", tag="after"),
            lens(found.layers, tuned=found.stored(), at="before"),
        ],
    )
    v1.run(job)
    (reading,) = lenses(v1, job)
    for place, layer in enumerate(found.layers):
        mapped = torch.from_numpy(v1.capture(job).array(layer)) @ jacobians[layer].T
        wanted = truth.head(truth.norm()(mapped)).log_softmax(dim=-1).detach().numpy()
        single = msgspec.structs.replace(
            reading,
            layers=[0],
            top_tokens=[reading.top_tokens[place]],
            top_logprobs=[reading.top_logprobs[place]],
        )
        check(single, wanted[None])
    rows = torch.from_numpy(v1.capture(job).array(2)).double()
    basis = jacobians[2].T.double() @ torch.tensor(head[[7, 123]].T).double()
    coordinates = rows @ torch.linalg.pinv(basis).T
    edited = rows + (coordinates[:, [1, 0]] - coordinates) @ basis.T
    after = torch.from_numpy(v1.capture(job, 1).array(2)).double()
    torch.testing.assert_close(after, edited, atol=1e-5, rtol=1e-5)
    assert (after - rows).abs().max() > 1e-3


def test_a_cached_prompt_is_read_from_kept_rows(cached: Host, truth: Truth) -> None:
    prompt = prompt_of(300, seed=31)
    jobs = [cached.job(prompt, max_tokens=2, capture=lens(ALL, "all_prompt")) for _ in range(2)]
    outputs = [cached.run(job)[job.id][0] for job in jobs]
    assert outputs[0].cached_tokens == 0
    assert outputs[1].cached_tokens == 256
    first, second = (lenses(cached, job)[0] for job in jobs)
    check(first, truth.logprobs(prompt))
    check(second, truth.logprobs(prompt))
    assert second.top_tokens == first.top_tokens


def test_a_failing_reading_fails_its_request_and_no_other(v1: Host) -> None:
    v1.call("midstream_fault", "reading")
    try:
        read = v1.job(prompt_of(9), max_tokens=2, capture=lens(ALL))
        other = v1.job(prompt_of(9), max_tokens=2, capture=capture_of(ALL, "all"))
        v1.run(read, other)
        (receipt,) = v1.receipts(read)
        (fine,) = v1.receipts(other)
        assert receipt.status == "error"
        assert receipt.kind == "reading_failed"
        assert fine.status == "ok"
        assert "lens: fault injected" in receipt.message
    finally:
        v1.call("midstream_fault", "")
    again = v1.job(prompt_of(9), max_tokens=2, capture=lens(ALL))
    v1.run(again)
    assert len(lenses(v1, again)) == 1


@pytest.mark.parametrize("engine", ["compiled", "v2"])
def test_lens_equals_transformers_under_other_runners(
    request: pytest.FixtureRequest, engine: str, truth: Truth
) -> None:
    host: Host = request.getfixturevalue(engine)
    job = host.job(prompt_of(70, seed=5), max_tokens=3, capture=lens(ALL, "all", tokens=NAMED))
    (output,) = host.run(job)[job.id]
    (reading,) = lenses(host, job)
    check(reading, truth.logprobs((job.prompts[0].token_ids + output.token_ids)[:-1]))


def test_ranks_join_a_vocabulary_that_they_share(tp2: Host, qwen3: Path) -> None:
    """Named tokens of either shard; a prompt from the cache; and a failure of one rank fails the
    request.
    """
    prompt = prompt_of(200, seed=9)
    truth = Truth(qwen3).logprobs(prompt)
    # a shard has 256 tokens
    captures = [lens(ALL, tokens=NAMED), lens(ALL, [0, 150, -1], top_k=300)]
    jobs = [tp2.job(prompt, max_tokens=1, capture=captures) for _ in range(2)]
    assert [tp2.run(job)[job.id][0] for job in jobs][1].cached_tokens == 128
    for job in jobs:
        assert [len(receipt.consumed) for receipt in tp2.receipts(job)] == [2, 2]
        for reading in lenses(tp2, job):
            check(reading, truth)
    plain = tp2.job(prompt, max_tokens=1, capture=capture_of(ALL, "all_prompt"))
    assert tp2.run(plain)[plain.id][0].cached_tokens in (0, 128)
    assert tp2.receipts(plain)[0].status == "ok"
    tp2.call("midstream_fault", "reading:rank=1")
    try:
        failing = tp2.job(prompt, max_tokens=1, capture=lens(ALL))
        tp2.run(failing)
        assert [(receipt.status, receipt.kind) for receipt in tp2.receipts(failing)] == [
            ("ok", ""),
            ("error", "reading_failed"),
        ]
    finally:
        tp2.call("midstream_fault", "")


def test_pipeline_stages_refuse_a_lens_with_the_reason(pp2: Host) -> None:
    assert "last pipeline stage" in pp2.info["readings"]["lens"]


# --- Architectures whose ends differ --------------------------------------------------------------


SMALL = {
    "certify": True,
    "engine.max_model_len": 128,
    "engine.max_num_seqs": 16,
    "kv_cache_gib": 0.125,
    "engine.block_size": 32,
}
#: A soft cap and the embedding as head; the others take minutes.
SHORT = {"gemma2"}
NAMES = (
    "gemma2",
    "gemma3",
    "gpt2",
    "gpt-neox",
    "mistral",
    "mixtral",
    "olmo",
    "olmo2",
    "opt",
    "phi3",
    "qwen2",
    "qwen3",
    "starcoder2",
    "granite",
    "cohere2",
    "olmo3",
    "glm4",
    "gpt-oss",
    "gemma4",
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name in SHORT else pytest.mark.matrix)
        for name in NAMES
    ],
)
def test_lens_equals_transformers_on_each_architecture(
    name: str, nurseries: Callable, tmp_path: Path
) -> None:
    path = checkpoint(name, tmp_path / "checkpoint")
    host: Host = nurseries("v1").host(tmp_path / "engine", path, CHANGED.get(name), **SMALL)
    with closing(host):
        assert host.info["readings"] == {**host.info["readings"], "lens": ""}
        layers = list(range(host.info["num_layers"]))
        job = host.job(
            prompt_of(40, seed=3),
            max_tokens=3,
            capture=lens(layers, "all", tokens=(9, 400), at="after"),
        )
        (output,) = host.run(job)[job.id]
        (reading,) = lenses(host, job)
        check(reading, Truth(path).logprobs((job.prompts[0].token_ids + output.token_ids)[:-1]))
        assert [row[0] for row in reading.top_tokens[-1][39:]] == output.token_ids
