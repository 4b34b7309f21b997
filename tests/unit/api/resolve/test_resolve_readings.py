"""What a lens comes to on a model, and which of them it refuses, by which field; the battery that
every kind of reading passes, with a row in `EXAMPLES`; and whether errors name what the client
wrote.
"""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from job_kit import job_result
from midstream_fake_engine.model import make_bundle, make_tokenizer
from refusal_kit import refuses
from sae_rows import D_IN, ROOT
from test_resolve_captures import bounds

from midstream.api.resolve.positions.captures import Bounds, resolve_captures
from midstream.api.resolve.prompts.request_parsing import ParsedRequest, parse_job
from midstream.api.resolve.prompts.tokenizer import Codec
from midstream.api.resolve.prompts.url_modules import as_written
from midstream.api.resolve.readings.readings import RULES, resolve_readings, with_token_ids
from midstream.api.resolve.readings.saes import resolve_sae
from midstream.api.responses.openai_shapes import extras
from midstream.broker.ledger.named.registry import Lookup
from midstream.broker.ledger.results.readings import readings
from midstream.client.render.readings import tables
from midstream.client.sdk.fields import ObservedFields
from midstream.schemas.artifacts.saes import SaeRequest, StoredSae
from midstream.schemas.base.errors import invalid
from midstream.schemas.base.limits import MAX_READING_WORK
from midstream.schemas.base.records import from_json, from_msgpack, to_json, to_msgpack
from midstream.schemas.extensions import Extension, ReaderTerms
from midstream.schemas.jobs import jobs, openai
from midstream.schemas.jobs.jobs import Sampling
from midstream.schemas.jobs.receipts import Consumed, Receipt
from midstream.schemas.jobs.results import JobResult
from midstream.schemas.readings import features, installed, lens
from midstream.schemas.readings.features import StoredFeatures
from midstream.schemas.readings.lens import LensSpec, StoredLens
from midstream.schemas.readings.readings import READINGS
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
    assert capture.sites == {"post_block": [0, 1, 2, 3]}
    assert capture.positions == "last_prompt"
    assert capture.at == "after"
    assert capture.consumers == [READER]
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


@pytest.mark.parametrize(
    ("lens", "lengths", "facts"),
    [
        (SOME, [], {}),
        ({"top_k": 1}, [], {"capture": ROWS}),
        ({"top_k": 9, "positions": "all_prompt"}, MANY, {"memory_limit_kib": 64}),
    ],
)
def test_what_comes_back_just_fits(
    lens: dict[str, Any], lengths: list[int], facts: dict[str, Any]
) -> None:
    assert resolved(lens, *lengths, **facts)


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


# --- The battery of all kinds

NORMS = Extension("reader", "norms", "p", "1", "d", ReaderTerms({"norm": "float32"}, row_bytes=4))
PLACES: Any = {"positions": [0, 1], "token_ids": [7, 8]}


def packed(kind: str, *values: float) -> bytes:
    return np.array(values, kind).tobytes()


class Example(NamedTuple):
    """A request, the parts of all ranks that have one, and what the result has of them."""

    asked: Any
    parts: list[Any]
    result: dict[str, Any]
    shown: str  # on the command line; empty: only the numbers, as JSON


EXAMPLES = {
    "lens": Example(
        {"layers": [0], "top_k": 1},
        [
            lens.LensPart(
                **{"capture": 0, "shard": shard, "shards": 2, "hook": "post_block", "layers": [0]},
                **{**PLACES, "named": [], "top": packed("<i4", shard, shard)},
                logits=packed("<f4", shard, -shard),
                total=packed("<f4", 1, 1),
            )
            for shard in (0, 1)
        ],
        {"top_tokens": [[[1], [0]]]},
        "top next token at post_block",
    ),
    "features": Example(
        [{"sae": "mine"}],
        [
            features.FeaturesPart(
                **{"capture": 0, "sae": "mine", "digest": "d", "hook": "post_block", "layer": 1},
                **{**PLACES, "indices": packed("<i4", 3, -1, 4, 5)},
                activations=packed("<f4", 2, 0, 2, 1),
                active=packed("<i4", 1, 2),
                errors=packed("<f4", 0.5, 0.25),
            )
        ],
        {"features": [[3], [4, 5]], "activations": [[2.0], [2.0, 1.0]], "active": [1, 2]},
        "features of mine at post_block of layer 1",
    ),
    "readers": Example(
        [{"name": "norms"}],
        [
            installed.ReaderPart(
                **{"capture": 0, "name": "norms", "package": "p", "version": "1", "digest": "d"},
                **{**PLACES, "options": {}, "sites": {"post_block": [layer]}, "of": 2},
                arrays={
                    "norm": installed.ReadArray(
                        dtype="float32", shape=[1], data=packed("<f4", layer)
                    )
                },
            )
            for layer in (1, 0)
        ],
        {"name": "norms", "options": {}},
        "",
    ),
}


@pytest.fixture(params=READINGS)
def field(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def served_by(**served: str) -> Bounds:
    """A model with a reader and an autoencoder. `served`: kind of reading → why not."""
    facts: Any = {"hidden_size": D_IN, "memory_limit_kib": 9, "extensions": [NORMS]}
    limits = bounds(6, 4, readings=served, **facts)
    sae = resolve_sae(SaeRequest(path="standard"), "mine", limits.model, str(ROOT))
    return replace(limits, found=Lookup("m", {("saes", "mine"): sae}))


def resolved_on(limits: Bounds, **fields: Any) -> list[list[StoredCapture]]:
    body = {"model": "m", "prompts": ["a", "b"], **fields}
    parsed = parse_job(from_json(to_json(body), jobs.JobRequest))
    return resolve_captures(None, limits, resolve_readings(parsed, limits))


def test_a_request_becomes_an_instruction_to_ranks(field: str) -> None:
    kind = READINGS[field]
    asked = EXAMPLES[field].asked
    captures = resolved_on(served_by(**{kind.name: ""}), **{field: asked})
    assert from_msgpack(to_msgpack(captures), list[list[StoredCapture]]) == captures
    for (capture,) in captures:
        assert type(capture.reading) is kind.stored
        assert capture.consumers == [READER]
        assert kind.stored.size(capture.reading, 2, 1) > 0  # type: ignore[arg-type]
    assert READINGS.keys() == RULES.keys() == EXAMPLES.keys()
    assert READINGS.keys() <= ObservedFields.__annotations__.keys()


def test_what_is_not_served_or_asked_twice_is_refused(field: str) -> None:
    kind = READINGS[field].name
    asked = EXAMPLES[field].asked
    at = f"{field}[0]" if isinstance(asked, list) else field
    with refuses("a version of Midstream without it", field=at):
        resolved_on(served_by(), **{field: asked})
    with refuses("m has none: it is elsewhere", field=at, allowed=None, hint="omit it"):
        resolved_on(served_by(**{kind: "it is elsewhere"}), **{field: asked})
    if isinstance(asked, list):
        with refuses(f"asks the same as {at}", field=f"{field}[1]"):
            resolved_on(served_by(**{kind: ""}), **{field: asked * 2})


def receipt(request: int, rank: int, part: Any) -> Receipt:
    consumed = [
        Consumed("memory", rows=b"rows"),
        Consumed(READER, rows=to_msgpack(part)),
        Consumed(READER, ok=False, message="no"),
    ]
    return Receipt(
        version="v",
        worker="w",
        boot="b",
        job="j",
        request=request,
        attempt=1,
        rank=rank,
        world=2,
        tp=0,
        pp=0,
        step=0,
        actions=0,
        checksum="0",
        status="ok",
        consumed=consumed,
    )


def test_parts_of_all_ranks_are_a_result_that_is_shown_and_answered(field: str) -> None:
    """By prompt, beside other consumers; a result of which a part is missing is not there."""
    parts = EXAMPLES[field].parts
    ticket = [receipt(request, rank, part) for request in (1, 0) for rank, part in enumerate(parts)]
    found = readings(ticket)
    assert [each.request for each in found[field]] == [0, 1]
    assert readings(ticket[:1]).keys() == ({field} if len(parts) == 1 else set())
    result = job_result("a", "b", **found)
    assert from_json(to_json(result), JobResult) == result
    for name, wanted in EXAMPLES[field].result.items():
        assert getattr(found[field][0], name) == wanted
    shown = [each for each in tables(result, {}) if isinstance(each, str)]
    title = EXAMPLES[field].shown
    assert shown == ([f"{title}, prompt {n}" for n in (0, 1)] if title else [])
    facts: Any = {"id": "j", "object": "o", "created": 1, "model": "m"}
    answer = openai.OpenAIAnswer(**facts, **extras(result, False, True, [field]))
    assert msgspec.to_builtins(answer).keys() == facts.keys() | {field}
    assert from_json(to_json(answer), openai.OpenAIAnswer) == answer


# --- Names of what the client wrote ---


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
        as_written(
            ParsedRequest(
                kind="completion",
                model="m",
                prompts=[],
                sampling=Sampling(),
                written={"capture": "a", "steering[1]": "b"},
            )
        ),
    ):
        raise invalid(ours, "is wrong")
