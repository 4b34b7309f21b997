"""A constraint on generated text holds with every runner and on several ranks, beside captures and
edits, and changes no other request.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from host import Host, capture_of, prompt_of
from msgspec.structs import replace
from nursery import Nursery
from reference import Edit, Reference
from rows_kit import check_rows
from tiny import HIDDEN, LAYERS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from midstream.schemas.jobs.jobs import StructuredRequest
from midstream.schemas.prompts.selectors import HOOKS

EVERYTHING = {hook: list(range(LAYERS)) for hook in HOOKS}
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
ALLOWED = {ALPHABET.index(letter) for letter in "xyz"}
FORM = StructuredRequest(regex="(x|y|z){5,9}")

MARKS = {
    "few blocks": [pytest.mark.matrix],
    "v2 runner": [pytest.mark.matrix],
    "two ranks": [pytest.mark.ranks, pytest.mark.matrix],
    "two stages": [pytest.mark.ranks, pytest.mark.matrix],
}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "few blocks": {"engine.num_gpu_blocks_override": 8},  # so few that requests preempt one another
    "v2 runner": {"runner": "v2", "engine.max_num_seqs": 8},
    "two ranks": {"engine.tensor_parallel_size": 2},
    "two stages": {"engine.pipeline_parallel_size": 2},
}

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def spelling(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a token for each byte: constraints are compiled for no tokenizer of whole
    words.
    """
    path = tmp_path_factory.mktemp("spelling") / "llama"
    shutil.copytree(llama, path)
    tokenizer = Tokenizer(
        models.BPE({letter: number for number, letter in enumerate([*ALPHABET, "</s>"])}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(path)
    return path


@pytest.fixture(
    scope="module",
    params=[pytest.param(way, marks=MARKS.get(way, ())) for way in WAYS],
)
def host(
    request: pytest.FixtureRequest,
    spelling: Path,
    nurseries: Callable[[str], Nursery],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Host]:
    options = {
        "engine.max_num_batched_tokens": 64,
        "engine.max_model_len": 256,
        "engine.enforce_eager": True,
    } | WAYS[request.param]
    host = nurseries(options.get("runner", "v1")).host(
        tmp_path_factory.mktemp("formats") / "engine", spelling, **options
    )
    yield host
    host.close()


def test_a_constrained_request_is_captured_and_steered_and_its_neighbour_is_alone(
    host: Host, spelling: Path
) -> None:
    edit = Edit(
        1, np.random.default_rng(3).normal(size=HIDDEN).astype(np.float32), hook="post_attn"
    )
    capture = capture_of([], "all", sites=EVERYTHING)
    prompt = prompt_of(80, seed=8)  # in two steps
    neighbour = prompt_of(12, seed=9)
    plain = host.job(neighbour, max_tokens=5)
    (alone,) = host.run(plain)[plain.id]
    job = host.job(
        prompt, max_tokens=5, capture=capture, steering=host.steering(edit), structured_outputs=FORM
    )
    beside = host.job(neighbour, max_tokens=5)
    answers = host.run(job, beside)
    tokens = answers[job.id][0].token_ids
    assert len(tokens) == 5
    assert set(tokens) <= ALLOWED
    assert answers[beside.id][0].token_ids == alone.token_ids
    assert not set(alone.token_ids) <= ALLOWED
    check_rows(host, Reference(spelling), job, answers[job.id], [edit])


def test_a_constraint_that_does_not_compile_fails_its_own_job_alone(host: Host) -> None:
    broken = host.job(prompt_of(9), structured_outputs=StructuredRequest(regex="[("))
    job = host.job(prompt_of(9))
    answer = host.run_any(broken, job)
    assert set(answer.errors) == {broken.id}
    assert answer.errors[broken.id].startswith("structured_outputs: ")
    assert len(answer.outputs[job.id][0].token_ids) == 4


def test_constrained_requests_end_where_the_constraint_does(host: Host) -> None:
    choices = ["x", "yy", "zzz"]
    jobs = []
    for number, choice in enumerate(choices):
        job = host.job(
            prompt_of(9 + number, seed=number),
            max_tokens=8,
            structured_outputs=StructuredRequest(choice=[choice]),
        )
        jobs.append(replace(job, sampling=replace(job.sampling, ignore_eos=False)))
    answers = host.run(*jobs)
    outputs = [answers[job.id][0] for job in jobs]
    assert [output.finish_reason for output in outputs] == ["stop"] * 3
    assert [output.token_ids[:-1] for output in outputs] == [
        [ALPHABET.index(letter) for letter in choice] for choice in choices
    ]
