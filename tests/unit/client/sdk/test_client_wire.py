"""Does the client say what is wrong in the user's terms, before and after a request?

Against a real HTTP server.
"""

import json
import os
import socket
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from http_kit import reply, server
from refusal_kit import refuses

from midstream import Client, SteeringSpec, VersionMismatch, __version__
from midstream.client.sdk import wire
from midstream.client.sdk.answers import download
from midstream.schemas.access.keys import KeyId
from midstream.schemas.base.errors import MidstreamError, invalid
from midstream.schemas.base.tensors import Tensor, from_numpy, to_numpy
from midstream.schemas.jobs.jobs import JobRequest, JobView, State
from midstream.schemas.prompts.selectors import HOOKS, INSIDE


def view(state: State = State.QUEUED) -> JobView:
    return JobView(
        id="job_x", kind="generate", model="m", state=state, attempt=1, version=1, created=1.0
    )


# --- Before a request ---


def test_a_numpy_vector_becomes_bytes_of_the_same_values() -> None:
    vector = np.array([1.5, -2.0, 3.25], dtype=np.float64)
    (spec,) = wire.pack_steering([{"layers": 3, "vector": vector, "scale": 2.0}])
    assert spec.vector is not None
    assert spec.vector.dtype == "float32"
    np.testing.assert_array_equal(to_numpy(spec.vector), vector.astype(np.float32))
    assert (spec.layers, spec.scale) == (3, 2.0)


def test_half_precision_stays_half_precision() -> None:
    (spec,) = wire.pack_steering([{"layers": 0, "vector": np.zeros(4, np.float16)}])
    assert spec.vector is not None
    assert spec.vector.dtype == "float16"


def test_a_list_of_numbers_and_a_ready_spec_are_taken_too() -> None:
    ready = SteeringSpec(layers=1, vector=Tensor(dtype="float32", shape=[1], data=b"\0" * 4))
    specs = wire.pack_steering([{"layers": 0, "vector": [1, 2]}, ready])
    assert specs[0].vector is not None
    assert specs[0].vector.shape == [2]
    assert specs[1] is ready


def test_the_matrices_of_a_low_rank_intervention_are_packed_too() -> None:
    rotation = np.arange(6.0).reshape(2, 3)
    (spec,) = wire.pack_steering(
        [
            {
                "layers": 0,
                "op": "lowrank",
                "rotation": rotation,
                "weight": rotation.tolist(),
                "bias": [0.5, 1],
            }
        ]
    )
    assert spec.rotation == spec.weight == from_numpy(rotation)
    assert spec.bias == from_numpy(np.array([0.5, 1.0]))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        (
            {"model": "m", "prompts": ["a"], "steering": [{"layers": 1, "vector": ["x"]}]},
            "steering[0].vector",
        ),
        (
            {
                "model": "m",
                "prompts": ["a"],
                "steering": [{"layers": 1, "op": "lowrank", "weight": [[1, 2], [3]]}],
            },
            "steering[0].weight",
        ),
        (
            {
                "model": "m",
                "prompts": ["a"],
                "steering": [{"layers": 1, "vector": [1.0], "strength": float("nan")}],
            },
            "steering[0]",
        ),
        (
            {
                "model": "m",
                "prompts": ["a"],
                "steering": [{"layers": 1, "vector": [1.0], "sclae": 2}],
            },
            "steering[0].sclae",
        ),
        ({"model": "m", "prompts": ["a"], "captures": {}}, "captures"),
        ({"model": "m", "prompts": ["a"], "capture": {"tag": "../up"}}, "capture.tag"),
        ({"model": "m", "prompts": []}, "prompts"),
        ({"model": "m", "prompts": ["a"], "sampling": {"max_tokens": 0}}, "sampling.max_tokens"),
    ],
)
def test_a_bad_field_is_named_before_anything_is_sent(
    fields: dict[str, object], field: str
) -> None:
    with refuses(kind="invalid_request", field=field):
        Client("http://127.0.0.1:1").submit(**fields)


@pytest.mark.parametrize(
    ("look", "said", "allowed"),
    [
        (
            lambda: wire.pack_steering([{"layers": 0, "vector": [1.0], "op": "clmp"}]),
            "'clmp'",
            "replace, lowrank, add, ablate, clamp",
        ),
        (lambda: wire.pack_capture({"hook": "foo"}), "'foo'", ", ".join((*HOOKS, *INSIDE))),
        (
            lambda: wire.checked("nope", KeyId, "id"),
            "id: does not match the pattern [0-9a-z]{12}",
            None,
        ),
    ],
)
def test_a_wrong_name_is_refused_with_what_would_be_right(
    look: Callable[[], object], said: str, allowed: str | None
) -> None:
    with refuses(said, allowed=allowed):
        look()


def test_one_prompt_may_be_given_as_text() -> None:
    assert wire.job_request(None, {"model": "m", "prompts": "hello"}) == JobRequest(
        model="m", prompts=["hello"]
    )


def test_ids_are_escaped_in_request_paths() -> None:
    assert (
        wire.job_path("../../healthz?x=1#", "result")
        == "/v1/jobs/..%2F..%2Fhealthz%3Fx%3D1%23/result"
    )


# --- After it ---


def test_a_problem_document_becomes_an_error_with_kind_field_and_advice() -> None:
    problem = invalid("capture.layers", "layer 99 is out of range", allowed="0 to 29").problem(
        "/v1/jobs"
    )
    with server(reply(problem, 400)) as (url, _), refuses() as caught:
        Client(url).jobs.get("job_x")
    error = caught.value
    assert (error.kind, error.field, error.detail, error.allowed) == (
        "invalid_request",
        "capture.layers",
        "layer 99 is out of range",
        "0 to 29",
    )


# field case 43
def test_an_answer_that_cannot_be_read_names_both_versions() -> None:
    stranger = {**json.loads(wire.to_json(view())), "moon_phase": 3}
    with (
        server(reply(stranger, version="9.9.9")) as (url, _),
        pytest.raises(VersionMismatch) as caught,
    ):
        Client(url).jobs.get("job_x")
    assert __version__ in str(caught.value)
    assert "9.9.9" in str(caught.value)


# field case 43
def test_a_field_that_another_version_does_not_know_names_both_versions() -> None:
    problem = invalid("capture.hook", "unknown field").problem()
    with (
        server(reply(problem, 400, version="0.0.1")) as (url, _),
        pytest.raises(VersionMismatch, match=r"0\.0\.1.*capture\.hook"),
    ):
        Client(url).jobs.get("job_x")


# field case 43
def test_another_version_that_is_understood_is_no_error() -> None:
    with server(reply(view(), version="9.9.9")) as (url, _):
        assert Client(url).jobs.get("job_x").id == "job_x"


def test_a_server_that_is_not_midstream_is_reported() -> None:
    with (
        server((404, {"content-type": "text/html"}, b"<html>nginx</html>")) as (url, _),
        refuses("is not Midstream"),
    ):
        Client(url).jobs.get("job_x")


def test_an_unreachable_server_is_named_with_its_address() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with refuses(match=url, kind="unavailable"):
        Client(url).jobs.get("job_x")


# field case 39
def test_a_failed_result_is_raised_and_never_returned() -> None:
    problem = MidstreamError("capture_failed", "rank 1: no space left on device").problem()
    with (
        server(reply(problem, 500)) as (url, _),
        refuses("no space left", kind="capture_failed"),
    ):
        Client(url).result("job_x")


def test_waiting_survives_an_api_that_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PAUSE_S", 0.01)
    busy = reply(MidstreamError("unavailable", "restarting").problem(), 503)
    with server(
        reply(view(), etag='"1"'),
        busy,
        (304, {wire.VERSION_HEADER: __version__}, b""),
        reply(view(State.SUCCEEDED)),
    ) as (
        url,
        seen,
    ):
        assert Client(url).wait("job_x", timeout=60).state is State.SUCCEEDED
    assert len(seen) == 4


def test_waiting_ends_with_its_timeout_and_names_the_state() -> None:
    with (
        server(reply(view(State.RUNNING))) as (url, _),
        pytest.raises(TimeoutError, match="still running"),
    ):
        Client(url).wait("job_x", timeout=0.05)


def test_waiting_for_an_unknown_job_fails_immediately() -> None:
    with (
        server(reply(MidstreamError("not_found", "there is no job job_x").problem(), 404)) as (
            url,
            seen,
        ),
        refuses(),
    ):
        Client(url).wait("job_x", timeout=60)
    assert len(seen) == 1


def test_a_submission_is_repeated_with_the_same_key_while_the_api_restarts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "PAUSE_S", 0.01)
    busy = reply(MidstreamError("unavailable", "restarting").problem(), 503)
    with server(busy, reply(view(), 202)) as (url, seen):
        assert Client(url).submit(model="m", prompts=["a"]).id == "job_x"
    assert len(seen) == 2
    assert seen[0] == seen[1]
    assert len(seen[0].split()) == 3


def test_a_stream_that_the_server_ends_with_a_problem_raises_it() -> None:
    problem = MidstreamError("unauthorized", "the key was revoked", field="Authorization").problem()
    told = (
        b'id: 1-0\nevent: state\ndata: {"state":"running","attempt":1}\n\nevent: '
        b"error\ndata: %b\n\n"
    ) % wire.to_json(problem)
    with server((200, {"content-type": "text/event-stream"}, told)) as (url, _):
        events = Client(url).jobs.events("job_x")
        assert next(events).event == "state"
        with refuses("the key was revoked") as caught:
            next(events)
    assert (caught.value.kind, caught.value.field) == ("unauthorized", "Authorization")


def test_events_resume_behind_the_last_one_seen_after_a_cut_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "PAUSE_S", 0.01)
    first = (
        b': ping\n\nid: 1-0\nevent: state\ndata: {"state": "running", "attempt": '
        b"2}\n\nid: 2-0\nevent: outp"
    )
    second = (
        b'id: 2-0\nevent: output\ndata: {"index": 0, "attempt": 2}\n\nid: 3-0\nevent: '
        b'done\ndata: {"state": "succeeded", "attempt": 2}\n\n'
    )
    # the server promises more than it sends
    cut = {"content-length": "5000", "connection": "close"}
    with server((200, cut, first), (200, {}, second)) as (url, seen):
        events = list(Client(url).jobs.events("job_x"))
    assert [(event.event, event.id, event.attempt) for event in events] == [
        ("state", "1-0", 2),
        ("output", "2-0", 2),
        ("done", "3-0", 2),
    ]
    assert seen == ["GET /v1/jobs/job_x/events", "GET /v1/jobs/job_x/events 1-0"]


def test_following_a_finished_job_ends_immediately() -> None:
    with server((204, {}, b"")) as (url, _):
        assert list(Client(url).jobs.events("job_x", after="9-0")) == []


# --- Downloads ---


@pytest.mark.parametrize(
    ("status", "kind"),
    [("pending", "conflict"), ("error", "capture_failed"), ("timed_out", "receipts_timed_out")],
)
def test_an_incomplete_capture_is_refused_with_its_status_unless_allowed(
    status: str, kind: str
) -> None:
    manifest = wire.Manifest(
        status=status,
        files=[promised("tag.p0000.pp0.safetensors", b"x")],
        detail="rank 1 is silent",
    )
    with refuses(match=rf"status {status} \(rank 1 is silent\)", kind=kind):
        download.check(manifest, "job_x", partial=False)
    download.check(manifest, "job_x", partial=True)
    with refuses("no capture files"):
        download.check(wire.Manifest(status=status), "job_x", partial=True)


def promised(name: str, content: bytes) -> wire.ManifestFile:
    return wire.ManifestFile(
        name=name, path=f"tag/job_x/{name}", bytes=len(content), crc32=zlib.crc32(content)
    )


def test_a_download_with_a_wrong_checksum_is_discarded(tmp_path: Path) -> None:
    file = promised("tag.p0000.pp0.safetensors", b"right")
    with refuses("CRC32"):
        download.save(tmp_path, "job_x", file, [b"wro", b"ng"])
    assert list(tmp_path.iterdir()) == []


def test_unreadable_or_foreign_files_are_not_read_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "tag.p0000.pp0.safetensors"
    for job in ("job_x", "job_y"):
        (tmp_path / "tag" / job).mkdir(parents=True)
        (tmp_path / "tag" / job / name).write_bytes(b"right")
    file = promised(name, b"right")
    manifest = wire.Manifest(status="ok", root=str(tmp_path), files=[file])
    assert len(download.in_place(manifest, "job_x")) == 1
    for path in (
        f"tag/job_y/{name}",
        f"../{tmp_path.name}/tag/job_x/{name}",
        str(tmp_path / "tag" / "job_x" / name),
    ):
        lie = wire.Manifest(
            status="ok", root=str(tmp_path), files=[msgspec.structs.replace(file, path=path)]
        )
        assert download.in_place(lie, "job_x") == []
    # another account's folder is closed to this one
    monkeypatch.setattr(os, "access", lambda path, how: False)
    assert download.in_place(manifest, "job_x") == []


# field case 40
@pytest.mark.parametrize("name", ["..", "../../.bashrc", "notes.txt", ".safetensors"])
def test_a_server_cannot_choose_where_a_download_goes(tmp_path: Path, name: str) -> None:
    with refuses("not a capture file's name"):
        download.save(tmp_path, "job_x", promised(name, b"x"), [b"x"])
    assert list(tmp_path.iterdir()) == []


def test_importing_the_client_loads_nothing_heavy() -> None:
    code = (
        "import sys, midstream.client as c; c.Client, c.AsyncClient, c.CaptureReader; "
        "import midstream.client.cli.main; print(*sys.modules)"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    heavy = {"torch", "vllm", "celery", "litestar", "transformers", "redis", "zmq"} & set(loaded)
    assert heavy == set()


def test_a_submission_without_a_model_takes_the_only_one_that_is_served() -> None:
    with server(reply({"data": [{"id": "m"}]}), reply(view(), 202)) as (url, seen):
        assert Client(url).submit(prompts=["a"]).id == "job_x"
    assert [line.split()[:2] for line in seen] == [["GET", "/v1/models"], ["POST", "/v1/jobs"]]
    assert json.loads(seen.bodies[-1])["model"] == "m"


def test_a_submission_without_a_model_lists_those_that_are_served() -> None:
    with (
        server(reply({"data": [{"id": "m"}, {"id": "n"}]})) as (url, _),
        refuses(field="model", allowed="m, n"),
    ):
        Client(url).submit(prompts=["a"])
