"""A job's record: what is written at acceptance is what is read, also by other versions."""

from typing import Any

import msgspec
import pytest

from midstream.broker.ledger.core import record
from midstream.broker.ledger.results import views
from midstream.schemas.access.handling import Callback
from midstream.schemas.artifacts.loras import LoraUse, StoredLora
from midstream.schemas.base.records import fields_of, from_msgpack, to_msgpack
from midstream.schemas.jobs.jobs import Job, JobView, Sampling, State, StoredPrompt
from midstream.schemas.settings.settings import Settings
from midstream_lab.records.sweep_units import SweepWork
from midstream_lab.records.sweeps import StoredPair, StoredSweep

#: Read by scripts, the API and the feed, not by views.
SCRIPTED = {"asked", "cost", "prompt", "request", "written_by"}
#: Stored by 0.1 for a running job.
STORED = {
    "asked": b"2",
    "attempt": b"1",
    "boot": b"boot1",
    "callback": b'{"url":"http://x/y","events":["job.failed"],"key":"k1"}',
    "capture_status": b"pending",
    "captures": b"1",
    "cells": b"0",
    "cells_expected": b"0",
    "contents": b'{"sae/x":"y"}',
    "cost": b"38",
    "created": b"1795145201.4220054",
    "everyone": b"0",
    "expected": b"4",
    "expires": b"1796145199.6720054",
    "global_version": b"0",
    "identity": b"aa",
    "kind": b"generate",
    "lora": b'{"name":"l","digest":"d"}',
    "metadata": b'{"a":"\xc3\xbc","b":"null"}',
    "model": b"tiny",
    "modules": b'{"m":"d"}',
    "priority": b"high",
    "prompts": b"2",
    "queued": b"1795145201.5",
    "receipts": b"0",
    "request": b'{"a":1}',
    "retried": b"ranks disagreed",
    "run": b"mine",
    "runs": b'{"r":"job_x"}',
    "said": b"0",
    "state": b"running",
    "steers": b"1",
    "step": b"0",
    "tenant": b"alice",
    "version": b"2",
    "worker": b"w1",
}


def make_job(**changes: Any) -> Job:
    fields: dict[str, Any] = {
        "id": "job_a",
        "kind": "generate",
        "model": "tiny",
        "prompts": [StoredPrompt(token_ids=[1, 2])],
        "sampling": Sampling(),
        "created": 1795145199.4220054,
    }
    return Job(**(fields | changes))


def written(job: Job, request: bytes = b"") -> dict[str, bytes]:
    """What Redis has of the record after the script has written it."""
    sent = msgspec.msgpack.encode(record.accepted(job, request))
    return {
        name: value if isinstance(value, bytes) else str(value).encode()
        for name, value in msgspec.msgpack.decode(sent).items()
    }


def read(stored: dict[str, bytes]) -> record.JobRecord:
    decoded = record.decode("job_a", [stored.get(name) for name in record.FIELDS])
    assert decoded is not None
    return decoded


def test_a_stored_record_is_read() -> None:
    known = read(STORED)
    assert known.captures
    assert known.steers
    assert not known.everyone
    assert known.retried == "ranks disagreed"
    assert known.lora == LoraUse(name="l", digest="d")
    assert views.view(known, Settings()) == JobView(
        id="job_a",
        kind="generate",
        model="tiny",
        state=State.RUNNING,
        attempt=1,
        version=2,
        created=1795145201.4220054,
        queued=1795145201.5,
        worker="w1",
        capture_status="pending",
        receipts_expected=4,
        prompts=2,
        metadata={"a": "ü", "b": "null"},
        modules={"m": "d"},
        runs={"r": "job_x"},
        run="mine",
        tenant="alice",
        priority="high",
        expires=1796145199.6720054,
        callback_url="http://x/y",
        steered=True,
        lora=LoraUse(name="l", digest="d"),
        identity="aa",
        contents={"sae/x": "y"},
        global_version=0,
    )


def test_a_list_has_a_job_with_the_beginning_of_its_prompt() -> None:
    stored = {**STORED, "prompt": b"Where is it?"}
    values = [stored.get(name) for name in record.LIST_FIELDS]
    listed = views.listed("job_a", values, Settings())
    assert listed is not None
    assert listed.prompt == "Where is it?"
    known = views.view(read(STORED), Settings())
    assert fields_of(listed, JobView) == fields_of(known, JobView)
    assert views.listed("job_a", [None] * len(values), Settings()) is None


def test_a_record_from_before_tenants_is_read() -> None:
    late = {"tenant", "priority", "identity", "contents", "lora", "runs", "modules", "run"}
    view = views.view(
        read({name: value for name, value in STORED.items() if name not in late}), Settings()
    )
    assert view.tenant == "default"
    assert view.priority == "normal"
    assert view.identity == ""
    assert view.run == ""
    assert view.contents == {}
    assert view.modules == {}
    assert view.runs == {}
    assert view.lora is None


def test_no_state_means_no_job() -> None:
    assert record.decode("job_a", [None] * len(record.FIELDS)) is None


def test_what_is_accepted_is_read() -> None:
    job = make_job(
        metadata={"a": "ü"},
        run="mine",
        expires=1796145199.0,
        callback=Callback(url="http://x", events=[]),
        key="k1",
        lora=StoredLora(name="l", digest="d", path="p"),
    )
    stored = written(job, b'{"a": 1}')
    assert stored["request"] == b'{"a": 1}'
    assert stored["created"] == b"1795145199.4220054"
    assert stored["callback"] == b'{"url":"http://x","events":[],"key":"k1","tenant":""}'
    known = read(stored)
    assert known.callback == Callback(url="http://x", events=[], key="k1")
    assert known.lora == LoraUse(name="l", digest="d")
    assert known.steers
    assert not known.captures
    same = ("kind", "model", "created", "metadata", "run", "expires", "tenant", "priority")
    assert all(getattr(known, name) == getattr(job, name) for name in same)


def test_an_absent_option_is_not_written() -> None:
    stored = written(from_msgpack(to_msgpack(make_job()), Job))
    assert not {"expires", "lora", "callback", "request", "probed"} & stored.keys()
    assert stored["run"] == b""
    assert stored["metadata"] == b"{}"


def test_every_written_field_is_described() -> None:
    full = make_job(
        expires=1.0,
        callback=Callback(url="http://x", events=[]),
        lora=StoredLora(name="l", digest="d", path="p"),
    )
    assert written(full, b"{}").keys() <= {*record.FIELDS} | SCRIPTED
    assert {*JobView.__struct_fields__} >= record.DERIVED


TEMPLATED = StoredPrompt(token_ids=[1], text="<|user|>Hi<|end|>")
PAIR = StoredPair(
    base=[1], source=[2], columns=[], base_tokens=["A ", "dog"], source_tokens=["A ", "cat"]
)
SWEEP = StoredSweep(
    pairs=[PAIR], hooks=["post_block"], layers=[0], metric="kl", direction="denoise"
)


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        (
            {"prompts": [StoredPrompt(token_ids=[1], text="é" * 500)]},
            "é" * (record.SHOWN - 1) + "…",
        ),
        ({}, ""),  # token ids are not text
        ({"title": "Hi", "prompts": [TEMPLATED]}, "Hi"),
        ({"prompts": [TEMPLATED]}, "<|user|>Hi<|end|>"),
        ({"kind": "sweep", "prompts": [], "work": SweepWork(sweep=SWEEP).packed}, "A cat → A dog"),
    ],
)
def test_a_record_says_what_was_asked(asked: dict[str, Any], shown: str) -> None:
    assert written(make_job(**asked))["prompt"].decode() == shown
