"""Does the client say what is wrong in the user's terms, before and after a request?

Against a real HTTP server.
"""

import json
import os
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from http_kit import Reply, reply, server
from job_kit import job_result, job_view
from refusal_kit import refuses

from midstream import (
    Client,
    MidstreamError,
    PatchSource,
    PatchSpec,
    VersionMismatch,
    __version__,
)
from midstream.client import values
from midstream.client.sdk import wire
from midstream.client.sdk.answers import download
from midstream.schemas.base.errors import invalid
from midstream.schemas.jobs.jobs import JobRequest, State
from midstream.schemas.requests.source_runs import RunPage, RunView
from midstream.schemas.requests.steering import GlobalView, ModuleView

# --- Before a request ---


MODULE = ModuleView(name="joy", model="m", digest="cd" * 32, entries=[], bytes=16, created=1.0)


GLOBAL = GlobalView(model="m", version=3, digest="", entries=[], changed=1.0)


RUN = RunView(name="clean", model="m", job="job_1", tag="t", created=1.0, state="ready")


PAGE = RunPage(runs=[RUN], next="more")


@pytest.mark.parametrize(
    ("call", "answer", "returned", "asked"),
    [
        (
            lambda c: c.modules.put("joy", {"post_block.3": [1.0]}),
            MODULE,
            MODULE,
            "PUT /v1/artifacts/modules/joy",
        ),
        (
            lambda c: c.modules.list(),
            {"modules": [MODULE]},
            [MODULE],
            "GET /v1/artifacts/modules",
        ),
        (
            lambda c: c.modules.get("joy.v2", model="m"),
            MODULE,
            MODULE,
            "GET /v1/artifacts/modules/joy.v2?model=m",
        ),
        (lambda c: c.modules.delete("joy"), {}, None, "DELETE /v1/artifacts/modules/joy"),
        (
            lambda c: c.global_steering.put([{"module": "joy", "scale": 2}]),
            GLOBAL,
            GLOBAL,
            "PUT /v1/steering/global",
        ),
        (lambda c: c.global_steering.get(), GLOBAL, GLOBAL, "GET /v1/steering/global"),
        (
            lambda c: c.global_steering.delete(model="m"),
            GLOBAL,
            GLOBAL,
            "DELETE /v1/steering/global?model=m",
        ),
        (
            lambda c: c.source_runs.list("m", limit=3, cursor="c"),
            PAGE,
            PAGE,
            "GET /v1/runs?model=m&limit=3&cursor=c",
        ),
        (lambda c: c.source_runs.get("clean", "m"), RUN, RUN, "GET /v1/runs/clean?model=m"),
        (lambda c: c.source_runs.get(job_result()), RUN, RUN, "GET /v1/runs/job_1"),
        (lambda c: c.source_runs.delete("a/b"), None, None, "DELETE /v1/runs/a%2Fb"),
    ],
)
def test_each_call_is_the_request_that_the_page_says(
    call: Any, answer: Any, returned: Any, asked: str
) -> None:
    with server(reply(answer)) as (url, seen), Client(url) as client:
        assert call(client) == returned
    assert seen == [asked]


# field case 40
@pytest.mark.parametrize("name", ["", "..", "../jobs", "a/b", "joy\n", "x" * 129])
def test_invalid_names_cannot_change_the_request_path(name: str) -> None:
    client = Client("http://127.0.0.1:1")
    for ask in (
        client.modules.get,
        client.modules.delete,
        lambda name: client.modules.put(name, {"post_block.3": [1.0]}),
    ):
        with refuses(field="name", kind="invalid_request"):
            ask(name)


def test_patches_go_with_jobs_completions_and_chats() -> None:
    patch = [{"layers": 3, "positions": [5], "source": "clean"}]
    spec = PatchSpec(layers=3, positions=[5], source=PatchSource(run="clean"))
    assert values.request(
        None, {"model": "m", "prompts": "x", "patch": patch}, JobRequest
    ) == JobRequest(model="m", prompts=["x"], patch=[spec])
    answer = {"choices": [{"index": 0, "text": "y", "finish_reason": "length"}]}
    with server(reply(answer)) as (url, seen), Client(url) as client:
        client.completion("m", "x", patch=patch)
        client.chat("m", [{"role": "user", "content": "x"}], patch=patch)
    of_completion, of_chat = (json.loads(body)["patch"] for body in seen.bodies)
    assert msgspec.convert(of_completion, list[PatchSpec]) == [spec]
    assert of_chat == of_completion


def test_ids_are_escaped_in_request_paths() -> None:
    assert (
        wire.job_path("../../healthz?x=1#", "result")
        == "/v1/jobs/..%2F..%2Fhealthz%3Fx%3D1%23/result"
    )


# --- After it ---


@pytest.mark.parametrize(
    ("ask", "error"),
    [
        (
            lambda client: client.jobs.get("job_x"),
            invalid("capture.layers", "layer 99 is out of range", allowed="0 to 29"),
        ),
        (  # field case 39
            lambda client: client.result("job_x"),
            MidstreamError("capture_failed", "rank 1: no space left on device"),
        ),
    ],
)
def test_a_problem_document_becomes_an_error_with_kind_field_and_advice(
    ask: Any, error: MidstreamError
) -> None:
    with (
        server(reply(error.problem(), error.status)) as (url, _),
        refuses(kind=error.kind, field=error.field, detail=error.detail, allowed=error.allowed),
    ):
        ask(Client(url))


# field case 43
@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        ({**json.loads(wire.to_json(job_view(id="job_x"))), "moon_phase": 3}, 200, ""),
        (invalid("capture.hook", "unknown field").problem(), 400, "capture.hook"),
    ],
)
def test_what_another_version_does_not_know_names_both_versions(
    answer: Any, status: int, words: str
) -> None:
    with (
        server(reply(answer, status, version="9.9.9")) as (url, _),
        pytest.raises(VersionMismatch) as caught,
    ):
        Client(url).jobs.get("job_x")
    for word in (__version__, "9.9.9", words):
        assert word in str(caught.value)


# field case 43
def test_other_servers_are_understood_or_reported() -> None:
    with server(reply(job_view(id="job_x"), version="9.9.9")) as (url, _):
        assert Client(url).jobs.get("job_x").id == "job_x"
    with (
        server((404, {"content-type": "text/html"}, b"<html>nginx</html>")) as (url, _),
        refuses("is not Midstream"),
    ):
        Client(url).jobs.get("job_x")


def test_waiting_survives_an_api_that_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PAUSE_S", 0.01)
    busy = reply(MidstreamError("unavailable", "restarting").problem(), 503)
    with server(
        reply(job_view(state=State.QUEUED), etag='"1"'),
        busy,
        (304, {wire.VERSION_HEADER: __version__}, b""),
        reply(job_view()),
    ) as (url, seen):
        assert Client(url).wait("job_x", timeout=60).state is State.SUCCEEDED
    assert len(seen) == 4


def test_waiting_ends_at_its_timeout_or_for_an_unknown_job() -> None:
    with (
        server(reply(job_view(id="job_x", state=State.RUNNING))) as (url, _),
        pytest.raises(TimeoutError, match="still running"),
    ):
        Client(url).wait("job_x", timeout=0.05)
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
    with server(busy, reply(job_view(id="job_x"), 202)) as (url, seen):
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
    assert caught.value.kind == "unauthorized"
    assert caught.value.field == "Authorization"


def test_events_resume_behind_the_last_one_seen_after_a_cut_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "PAUSE_S", 0.01)
    first = (
        b'retry: 3000\n\n: ping\n\nid: 1-0\nevent: state\ndata: {"state": "running", "attempt": '
        b"2}\n\nid: 2-0\nevent: outp"
    )
    second = (
        b'id: 2-0\nevent: output\ndata: {"index": 0, "attempt": 2}\n\nid: 3-0\nevent: '
        b'done\ndata: {"state": "succeeded", "attempt": 2}\n\n'
    )
    # the server promises more than it sends
    of_events = {"content-type": "text/event-stream"}
    cut = {"content-length": "5000", "connection": "close"} | of_events
    with server((200, cut, first), (200, of_events, second)) as (url, seen):
        events = list(Client(url).jobs.events("job_x"))
    assert [(event.event, event.id, event.attempt) for event in events] == [
        ("state", "1-0", 2),
        ("output", "2-0", 2),
        ("done", "3-0", 2),
    ]
    assert seen == ["GET /v1/jobs/job_x/events", "GET /v1/jobs/job_x/events 1-0"]


def test_separators_of_lines_in_a_text_end_no_event() -> None:
    text = "a\u2028b\u2029c\x85d"
    told = b"id: 1-0\nevent: done\ndata: %b\n\n" % wire.to_json({"text": text})
    with server((200, {"content-type": "text/event-stream"}, told)) as (url, _):
        (event,) = Client(url).jobs.events("job_x")
    assert event.data == {"text": text}


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
    manifest = wire.ReadManifest(
        status=status,
        files=[promised("tag.p0000.pp0.safetensors", b"x")],
        detail="rank 1 is silent",
    )
    with refuses(match=rf"status {status} \(rank 1 is silent\)", kind=kind):
        download.check(manifest, "job_x", partial=False)
    download.check(manifest, "job_x", partial=True)
    with refuses("no capture files"):
        download.check(wire.ReadManifest(status=status), "job_x", partial=True)


def promised(name: str, content: bytes) -> wire.ManifestEntry:
    return wire.ManifestEntry(
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
    manifest = wire.ReadManifest(status="ok", root=str(tmp_path), files=[file])
    assert len(download.in_place(manifest, "job_x")) == 1
    for path in (
        f"tag/job_y/{name}",
        f"../{tmp_path.name}/tag/job_x/{name}",
        str(tmp_path / "tag" / "job_x" / name),
    ):
        lie = wire.ReadManifest(
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
        "import sys, midstream as m; m.Client('http://127.0.0.1:1'), m.AsyncClient;"
        "m.CaptureReader, m.PatchStudy; import midstream.client.cli.main; print(*sys.modules)"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/"
    ).stdout.split()
    servers = {"torch", "vllm", "celery", "litestar", "transformers", "redis", "zmq"}
    assert (servers | {"pandas", "xarray", "matplotlib"}) & set(loaded) == set()


PAIR: Any = {"pairs": [{"clean": "a", "corrupt": "b", "answer": " c"}]}
SUBMITTED: dict[str, Callable[[Client], Any]] = {
    "/v1/jobs": lambda client: client.submit(prompts=["a"]),
    "/v1/sweeps": lambda client: client.sweeps.submit(hooks=["resid_pre"], **PAIR),
    "/v1/attributions": lambda client: client.attributions.submit(clean="a", foil=" c", model=None),
    "/v1/harvests": lambda client: client.harvests.submit(source={"lines": ["a"]}),
}


@pytest.mark.parametrize("path", SUBMITTED)
def test_a_submission_without_a_model_takes_the_only_one_that_is_served(path: str) -> None:
    refusal = reply(invalid("x", "is wrong").problem(), 400)
    with server(reply({"data": [{"id": "m"}]}), refusal) as (url, seen), refuses(field="x"):
        SUBMITTED[path](Client(url))
    assert [line.split()[:2] for line in seen[:2]] == [["GET", "/v1/models"], ["POST", path]]
    assert json.loads(seen.bodies[-1])["model"] == "m"
    for served, wanted in (
        (["m", "n"], refuses("several models are served", field="model", allowed="m, n")),
        ([], refuses("no model is loaded yet", kind="unavailable")),
    ):
        with server(reply({"data": [{"id": name} for name in served]})) as (url, _), wanted:
            SUBMITTED[path](Client(url))


CONTENT = b"rows of a capture"


def linked(link: str | None) -> wire.ManifestEntry:
    return msgspec.structs.replace(promised("t.p0000.pp0.safetensors", CONTENT), link=link)


def test_a_file_is_taken_from_the_store_by_its_link(tmp_path: Path) -> None:
    with server((200, {}, CONTENT)) as (url, seen):
        path = download.from_link(tmp_path, "job_x", linked(f"{url}/bucket/p?X-Amz-Signature=1"))
    assert path is not None
    assert path.read_bytes() == CONTENT
    assert seen == ["GET /bucket/p?X-Amz-Signature=1"]
    assert seen.authorizations == [None], "the key is the API's"


@pytest.mark.parametrize(
    "answer",
    [
        (403, {}, b"expired"),
        (200, {}, b"other bytes"),
        (200, {}, b""),
        (302, {"location": "/x"}, b""),
    ],
)
def test_a_link_that_does_not_work_is_left_to_the_api(tmp_path: Path, answer: Reply) -> None:
    with server(answer) as (url, _):
        assert download.from_link(tmp_path, "job_x", linked(f"{url}/bucket/p")) is None
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize("link", [None, "http://127.0.0.1:1/p", "nonsense", "file:///etc/passwd"])
def test_no_server_behind_a_link_is_no_error(tmp_path: Path, link: str | None) -> None:
    assert download.from_link(tmp_path, "job_x", linked(link)) is None
    # a bucket is not opened for want of credentials that are the server's
    bucket = wire.ReadManifest("ok", [linked(link)], "s3://bucket/prefix")
    assert download.in_place(bucket, "job_x") == []
