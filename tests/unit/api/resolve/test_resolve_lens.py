"""What a lens comes to on a model, and which of them it refuses, by which field; and whether what
an answer to vllm-lens' clients holds is bounded.
"""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from midstream_fake_engine.model import make_bundle, make_tokenizer
from model_kit import model
from refusal_kit import refuses
from test_resolve_captures import bounds

from midstream.api.resolve.positions.captures import resolve_captures
from midstream.api.resolve.prompts.request_parsing import ParsedRequest
from midstream.api.resolve.prompts.tokenizer import Codec
from midstream.api.resolve.prompts.vllm_lens_fields import TAG, as_written, check_answer
from midstream.api.resolve.readings.readings import resolve_readings, with_token_ids
from midstream.schemas.artifacts.saes import StoredSae
from midstream.schemas.base.errors import invalid
from midstream.schemas.base.limits import MAX_READING_WORK
from midstream.schemas.jobs.jobs import Job, Sampling, StoredPrompt
from midstream.schemas.readings.features import StoredFeatures
from midstream.schemas.readings.lens import LensSpec, StoredLens
from midstream.schemas.readings.stored import READER
from midstream.schemas.requests.specs import CaptureSpec, StoredCapture


def resolved(
    lens: dict[str, Any], *lengths: int, capture: CaptureSpec | None = None, **changes: Any
) -> list[list[StoredCapture]]:
    limits = bounds(*lengths, **({"readings": {"lens": ""}} | changes))
    parsed: Any = SimpleNamespace(readings={"lens": msgspec.convert(lens, LensSpec)})
    return resolve_captures(capture, limits, resolve_readings(parsed, limits))


def test_the_default_lens_reads_the_last_token_of_all_layers() -> None:
    ((capture,),) = resolved({})
    assert (capture.sites, capture.positions, capture.at, capture.consumers) == (
        {"post_block": [0, 1, 2, 3]},
        "last_prompt",
        "after",
        [READER],
    )
    assert capture.reading == StoredLens(top_k=5)


ROWS = CaptureSpec(layers=[0], consumers=["memory"], positions="all_prompt")


SOME = {"positions": [0, 1, 2, 3, 4, 5], "top_k": 4}


MANY = [40] * 200


@pytest.mark.parametrize(
    ("resolve", "field", "words"),
    [
        *(
            (lambda lens=lens: resolved({"top_k": 2, **lens}), field, words)
            for lens, field, words in (
                (
                    {"hook": "mlp_in"},
                    "lens.hook",
                    "do not go through the model's final norm; valid: pre_attn, attn_out",
                ),
                ({"hook": "post_attn"}, "lens.hook", "unknown hook 'post_attn'"),
                ({"layers": "0-9"}, "lens.layers", "layer 9"),
                ({"positions": [7]}, "lens.positions[0]", "7"),
                ({"top_k": 10}, "lens.top_k", "10 exceeds the vocabulary's 9 tokens"),
                (
                    {"tokens": [3, 9]},
                    "lens.tokens[1]",
                    "token id 9 is outside the vocabulary; valid: 0 to 8",
                ),
                ({"tokens": [3, 3]}, "lens.tokens[1]", "named twice"),
                (
                    {"positions": "all", "top_k": 9},
                    "lens",
                    "may produce 2826 bytes of results: a response holds at most 1 KiB per prompt",
                ),
            )
        ),
        (lambda: resolved(SOME, capture=ROWS), "lens", ""),
        (
            lambda: resolved(
                {"top_k": 9, "positions": "all_prompt"}, *MANY, memory_limit_kib=64, tp=8
            ),
            "lens",
            "the job's 200 prompts may produce",
        ),
    ],
)
def test_a_lens_that_cannot_be_had_is_refused_by_its_field(
    resolve: Any, field: str, words: str
) -> None:
    with refuses(words, kind="invalid_request", field=field):
        resolve()


def test_what_comes_back_just_fits() -> None:
    assert resolved(SOME)
    assert resolved({"top_k": 1}, capture=ROWS)
    assert resolved({"top_k": 9, "positions": "all_prompt"}, *MANY, memory_limit_kib=64)


@pytest.mark.parametrize(
    ("reading", "rows"),
    [
        (StoredLens(top_k=1), 1 << 19),
        (
            StoredFeatures(sae=StoredSae("s", "d", "p", "post_block", 0, bytes=8 << 30), top_k=1),
            1 << 17,
        ),
    ],
)
def test_the_work_of_readings_is_bounded_over_all_prompts(reading: Any, rows: int) -> None:
    capture = StoredCapture(
        sites={"post_block": [0]},
        positions="all_prompt",
        consumers=[READER],
        reading=reading,
        tag="",
    )

    def read(*lengths: int) -> Any:
        limits = bounds(*lengths, vocab_size=1 << 17, hidden_size=4096, memory_limit_kib=32 << 10)
        return resolve_captures(None, limits, [("lens", [capture, capture])])

    assert read(rows // 2, rows // 2)
    with refuses(f"at most {MAX_READING_WORK} per job", status=400, field="lens"):
        read(rows // 2, rows // 2 + 1)


@pytest.mark.parametrize("top_k", [0, 101])
def test_top_k_is_bounded(top_k: int) -> None:
    with pytest.raises(msgspec.ValidationError, match="top_k"):
        msgspec.convert({"top_k": top_k}, LensSpec)


def test_named_tokens_are_ids_or_texts_of_one_token() -> None:
    tokenizer = make_tokenizer()
    codec = Codec(make_bundle(tokenizer))
    spec = asyncio.run(with_token_ids(LensSpec(tokens=["a", 5, "b"]), codec))
    assert spec.tokens == [tokenizer.token_to_id("a"), 5, tokenizer.token_to_id("b")]
    with refuses(field="lens.tokens[1]", detail="'ab' is 2 tokens: 'a', 'b'"):
        asyncio.run(with_token_ids(LensSpec(tokens=[5, "ab"]), codec))


# --- Lens args ---


AT = "vllm_xargs.output_residual_stream"
WIDE = model(hidden_size=4096, dtype="bfloat16")
PARSED = ParsedRequest(
    kind="completion",
    model="m",
    prompts=[],
    sampling=Sampling(),
    returns_rows=True,
    written={"capture": AT},
)


def job_of(max_tokens: int) -> Job:
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
    check_answer(PARSED, job_of(5), WIDE, 1)  # 28 and 4 fed back
    with refuses("vllm_lens_mib", kind="invalid_request", field=AT):
        check_answer(PARSED, job_of(6), WIDE, 1)
    check_answer(replace(PARSED, returns_rows=False), job_of(6), WIDE, 1)


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
