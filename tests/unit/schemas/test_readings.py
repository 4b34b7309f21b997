"""The battery that every kind of reading passes, from the request to what is shown of its result.

A kind has a row in `EXAMPLES`.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from job_kit import job_result
from model_kit import bounds
from refusal_kit import refuses
from sae_rows import D_IN, ROOT

from midstream.api.resolve.positions.captures import Bounds, resolve_captures
from midstream.api.resolve.prompts.request_parsing import parse_job
from midstream.api.resolve.readings.readings import RULES, resolve_readings
from midstream.api.resolve.readings.saes import resolve_sae
from midstream.api.responses.openai_shapes import extras
from midstream.broker.ledger.named.registry import Lookup
from midstream.broker.ledger.results.readings import readings
from midstream.client.render.readings import tables
from midstream.client.sdk.fields import ObservedFields
from midstream.schemas.artifacts.saes import SaeRequest
from midstream.schemas.base.records import from_json, from_msgpack, to_json, to_msgpack
from midstream.schemas.extensions import Extension, ReaderTerms
from midstream.schemas.jobs.jobs import JobRequest, JobResult
from midstream.schemas.jobs.openai import OpenAIAnswer
from midstream.schemas.jobs.receipts import Consumed, Receipt
from midstream.schemas.readings.features import FeaturesPart
from midstream.schemas.readings.installed import ReadArray, ReaderPart
from midstream.schemas.readings.lens import LensPart
from midstream.schemas.readings.readings import READINGS
from midstream.schemas.readings.stored import READER
from midstream.schemas.requests.specs import StoredCapture

NORMS = Extension("reader", "norms", "p", "1", "d", ReaderTerms({"norm": "float32"}, row_bytes=4))
ROWS: Any = {"positions": [0, 1], "token_ids": [7, 8]}


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
            LensPart(
                **{"capture": 0, "shard": shard, "shards": 2, "hook": "post_block", "layers": [0]},
                **{**ROWS, "named": [], "top": packed("<i4", shard, shard)},
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
            FeaturesPart(
                **{"capture": 0, "sae": "mine", "digest": "d", "hook": "post_block", "layer": 1},
                **{**ROWS, "indices": packed("<i4", 3, -1, 4, 5)},
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
            ReaderPart(
                **{"capture": 0, "name": "norms", "package": "p", "version": "1", "digest": "d"},
                **{**ROWS, "options": {}, "sites": {"post_block": [layer]}, "of": 2},
                arrays={"norm": ReadArray(dtype="float32", shape=[1], data=packed("<f4", layer))},
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


def model(**served: str) -> Bounds:
    """A model with a reader and an autoencoder. `served`: kind of reading → why not."""
    limits = bounds(6, 4, hidden_size=D_IN, memory_limit_kib=9, readings=served, extensions=[NORMS])
    sae = resolve_sae(SaeRequest(path="standard"), "mine", limits.model, str(ROOT))
    return replace(limits, found=Lookup("m", {("saes", "mine"): sae}))


def resolved(limits: Bounds, **fields: Any) -> list[list[StoredCapture]]:
    body = {"model": "m", "prompts": ["a", "b"], **fields}
    parsed = parse_job(from_json(to_json(body), JobRequest))
    return resolve_captures(None, limits, resolve_readings(parsed, limits))


def test_a_request_becomes_an_instruction_to_ranks(field: str) -> None:
    kind, asked = READINGS[field], EXAMPLES[field].asked
    captures = resolved(model(**{kind.name: ""}), **{field: asked})
    assert from_msgpack(to_msgpack(captures), list[list[StoredCapture]]) == captures
    for (capture,) in captures:
        assert (type(capture.reading), capture.consumers) == (kind.stored, [READER])
        assert kind.stored.size(capture.reading, 2, 1) > 0  # type: ignore[arg-type]
    assert READINGS.keys() == RULES.keys() == EXAMPLES.keys()
    assert READINGS.keys() <= ObservedFields.__annotations__.keys()


def test_what_is_not_served_or_asked_twice_is_refused(field: str) -> None:
    kind, asked = READINGS[field].name, EXAMPLES[field].asked
    at = f"{field}[0]" if isinstance(asked, list) else field
    with refuses("a version of Midstream without it", field=at):
        resolved(model(), **{field: asked})
    with refuses("m has none: it is elsewhere", field=at):
        resolved(model(**{kind: "it is elsewhere"}), **{field: asked})
    if isinstance(asked, list):
        with refuses(f"asks the same as {at}", field=f"{field}[1]"):
            resolved(model(**{kind: ""}), **{field: asked * 2})


def receipt(request: int, rank: int, part: Any) -> Receipt:
    consumed = [
        Consumed("memory", rows=b"rows"),
        Consumed(READER, rows=to_msgpack(part)),
        Consumed(READER, ok=False, message="no"),
    ]
    return Receipt(
        "v", "w", "b", "j", request, 1, rank, 2, 0, 0, 0, 0, "0", "ok", consumed=consumed
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
    assert shown == [f"{EXAMPLES[field].shown}, prompt {n}" for n in (0, 1)] * bool(
        EXAMPLES[field].shown
    )
    facts: Any = {"id": "j", "object": "o", "created": 1, "model": "m"}
    answer = OpenAIAnswer(**facts, **extras(result, False, True, [field]))
    assert msgspec.to_builtins(answer).keys() == facts.keys() | {field}
    assert from_json(to_json(answer), OpenAIAnswer) == answer
