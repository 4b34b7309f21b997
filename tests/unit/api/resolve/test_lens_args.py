"""Is what an answer to vllm-lens' clients holds bounded before the job is accepted?"""

from dataclasses import replace

import pytest
from refusal_kit import refuses

from midstream.api.resolve.prompts.request_parsing import ParsedRequest
from midstream.api.resolve.prompts.vllm_lens_fields import TAG, as_written, check_answer
from midstream.schemas.base.errors import invalid
from midstream.schemas.jobs.jobs import Job, Sampling, StoredPrompt
from midstream.schemas.jobs.models import ModelInfo
from midstream.schemas.requests.specs import StoredCapture

AT = "vllm_xargs.output_residual_stream"
MODEL = ModelInfo(
    name="m",
    version="0",
    architecture="A",
    num_layers=8,
    hidden_size=4096,
    vocab_size=9,
    max_model_len=4096,
    dtype="bfloat16",
    hooks=["post_block"],
    tokenizer="",
)
PARSED = ParsedRequest(
    kind="completion",
    model="m",
    prompts=[],
    sampling=Sampling(),
    returns_rows=True,
    written={"capture": AT},
)


def job(max_tokens: int) -> Job:
    """One prompt of 28 tokens, 4 layers: 32 KiB for each position."""
    capture = StoredCapture(sites={"post_block": [0, 1, 2, 3]}, positions="all", tag=TAG)
    everyones = StoredCapture(sites={"post_block": [0]}, positions="all", tag="global")
    return Job(
        id="j",
        kind="completion",
        model="m",
        prompts=[StoredPrompt(token_ids=[1] * 28)],
        sampling=Sampling(max_tokens=max_tokens),
        created=0.0,
        captures=[[everyones, capture]],
    )


def test_rows_up_to_the_limit_are_accepted_and_one_more_position_is_not() -> None:
    check_answer(PARSED, job(5), MODEL, 1)  # 28 and 4 fed back
    with refuses("vllm_lens_mib", kind="invalid_request", field=AT):
        check_answer(PARSED, job(6), MODEL, 1)
    check_answer(replace(PARSED, returns_rows=False), job(6), MODEL, 1)


@pytest.mark.parametrize(
    ("ours", "written"),
    [
        ("steering[1]", "b"),
        ("steering[1].layers", "b"),
        ("steering[10]", "steering[10]"),
        ("steering[0].scale", "steering[0].scale"),
        ("capture", "a"),
        ("capture.layers", "a"),
        ("capture_wait", "capture_wait"),
    ],
)
def test_errors_name_what_the_client_wrote(ours: str, written: str) -> None:
    with (
        refuses(field=written),
        as_written(replace(PARSED, written={"capture": "a", "steering[1]": "b"})),
    ):
        raise invalid(ours, "is wrong")
