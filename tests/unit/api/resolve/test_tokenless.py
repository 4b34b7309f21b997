"""What may a job ask for whose `max_tokens` is 0, and how many layers does it compute?"""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from model_kit import bounds, model
from refusal_kit import refuses
from tokenizers import Tokenizer, models

from midstream.api.resolve.admission.admission import admit
from midstream.api.resolve.admission.tokenless import OF_TOKENS, check_tokenless, layers_of
from midstream.api.resolve.positions.captures import resolve_captures
from midstream.api.resolve.prompts.request_parsing import parse_job
from midstream.api.resolve.prompts.tokenizer import Codec
from midstream.schemas.base.records import from_json, to_json
from midstream.schemas.base.tensors import from_numpy
from midstream.schemas.jobs.jobs import Job, JobRequest, Sampling, SamplingRequest, StoredPrompt
from midstream.schemas.jobs.models import TokenizerBundle
from midstream.schemas.prompts.selectors import Span
from midstream.schemas.requests.specs import CaptureSpec, StoredCapture

CAPTURE = {"layers": 1}
#: Say how a token is chosen or written; without one, they have no effect.
IDLE = {
    "max_tokens", "temperature", "top_p", "top_k", "seed", "ignore_eos", "prompt_logprobs", "min_p",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "skip_special_tokens",
    "spaces_between_special_tokens", "include_stop_str_in_output",
}  # fmt: skip


def parsed(sampling: dict[str, Any] | None = None, **body: Any) -> Any:
    fields = {"model": "m", "prompts": [[1, 2, 3]], **body}
    fields["sampling"] = {"max_tokens": 0, **(sampling or {})}
    return parse_job(from_json(to_json(fields), JobRequest))


def admitted(
    sampling: dict[str, Any] | None = None,
    exits: bool = True,
    everyones: Sequence[CaptureSpec] = (),
    **body: Any,
) -> Job:
    asked = parsed(sampling, **body)
    words = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    bundle = TokenizerBundle(
        tokenizer_json=words.to_str(), chat_template="", special_tokens={}, eos_token_ids=[]
    )
    served = model(exits=exits, readings={"lens": ""}, global_captures=list(everyones))
    return asyncio.run(admit(asked, served, Codec(bundle, 64), "job_x")).job


@pytest.mark.parametrize(
    "asked",
    [
        {"capture": CAPTURE},
        {"probes": ["p"]},
        {"policies": ["p"]},
        {"lens": {}},
        {"features": [{"sae": "s"}]},
        {"readers": [{"name": "r"}]},
        {"sampling": {"prompt_logprobs": 0}},
        {"capture": CAPTURE, "sampling": {"temperature": 1.0, "seed": 3, "ignore_eos": True}},
    ],
)
def test_a_job_without_tokens_asks_for_rows_scores_or_readings(asked: dict[str, Any]) -> None:
    check_tokenless(parsed(**asked))


@pytest.mark.parametrize("asked", [{}, {"lora": "l"}, {"steering": [{"module": "m"}]}])
def test_a_job_that_asks_for_nothing_but_tokens_has_some(asked: dict[str, Any]) -> None:
    with refuses("at least 1", "capture", field="sampling.max_tokens"):
        check_tokenless(parsed(**asked))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logprobs", 0),
        ("min_tokens", 1),
        ("stop", ["."]),
        ("stop_token_ids", [1]),
        ("logit_bias", {"1": 1.0}),
        ("allowed_token_ids", [1]),
        ("bad_words", ["x"]),
        ("structured_outputs", {"choice": ["a"]}),
    ],
)
def test_what_is_asked_of_a_token_is_refused_by_its_field(name: str, value: Any) -> None:
    with refuses("max_tokens is 0", field=f"sampling.{name}"):
        check_tokenless(parsed({name: value}, capture=CAPTURE))
    check_tokenless(parsed({name: value, "max_tokens": 1}, capture=CAPTURE))


def test_every_sampling_parameter_is_one_or_the_other() -> None:
    assert {*OF_TOKENS} | IDLE == {*SamplingRequest.__struct_fields__}
    assert not {*OF_TOKENS} & IDLE


def test_rows_of_generated_tokens_alone_are_refused() -> None:
    alone = CaptureSpec(positions="all_generated")
    with refuses("max_tokens is 0", "all_prompt", field="capture.positions"):
        resolve_captures(alone, bounds(6, max_tokens=0))
    with refuses("out of range", field="capture.positions.start"):
        admitted(capture={"positions": {"start": 6}})
    ((found,),) = resolve_captures(CaptureSpec(positions="all"), bounds(6, max_tokens=0))
    assert found.count_stored(6, 0) == found.count_stored(6, 1) == 6
    with refuses("max_tokens is 0", field="lens.positions"):
        admitted(lens={"positions": "all_generated"})


def test_a_patch_reaches_the_whole_prompt_without_tokens() -> None:
    body = {"layers": 1, "source": {"vector": from_numpy(np.ones(8, np.float32))}}
    for positions, found in (("all", [0, 1, 2]), ([-1], [2])):
        job = admitted(capture=CAPTURE, patch=[body | {"positions": positions}])
        assert list(job.steering[0][0].positions) == found
    with refuses("no generated token", field="patch[0].positions"):
        admitted(capture=CAPTURE, patch=[body | {"positions": "all_generated"}])


@pytest.mark.parametrize(
    ("asked", "layers"),
    [
        ({"capture": {"layers": 1}}, 2),
        ({"capture": {"hooks": {"pre_attn": 0, "mlp_out": [0, 2]}}}, 3),
        ({"capture": {"layers": 1}, "exits": False}, None),
        ({"capture": {"layers": 1}, "sampling": {"max_tokens": 1}}, None),
        ({"capture": {"layers": 1}, "sampling": {"prompt_logprobs": 0}}, None),
    ],
)
def test_a_job_says_how_many_layers_it_computes(asked: dict[str, Any], layers: int | None) -> None:
    assert admitted(**asked).layers == layers


def test_the_deepest_prompt_counts() -> None:
    captures = [[], [StoredCapture(sites={"post_block": [0, 3]}, positions="all", tag="t")]]
    prompts = [StoredPrompt(token_ids=[1, 2])] * 2
    assert layers_of(Sampling(max_tokens=0), prompts, captures, [], model(exits=True)) == 4


@pytest.mark.parametrize(
    ("positions", "layers"),
    [("all_generated", 2), (Span(start=3), 2), ("last_prompt", 4), (Span(start=2), 4)],
)
def test_everyones_capture_that_selects_no_row_of_the_prompt_computes_no_layer(
    positions: Any, layers: int
) -> None:
    everyones = CaptureSpec(layers=3, positions=positions, tag="global")
    assert admitted(capture=CAPTURE, everyones=[everyones]).layers == layers
