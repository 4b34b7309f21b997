"""Can captured tensors be found, fetched and deleted over HTTP, bit for bit, and nothing else of
the disk?
"""

import os
import resource
import zlib
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import numpy as np
import pytest
from capture_kit import HIDDEN as CAPTURED_SIZE, finished, values, write
from edge import Api, Hand, refused, running
from refusal_kit import refuses
from typer.testing import CliRunner

from midstream.broker.ledger.jobs.captures import LedgerCaptures
from midstream.broker.ledger.jobs.ledger import Claim
from midstream.client import CaptureReader, Client
from midstream.client.cli import main
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import now
from midstream.schemas.jobs.receipts import CapturedFile


@pytest.fixture
def captured(api: Api, hand: Hand) -> str:
    """A finished job: two prompts of three tokens, all layers, one stage."""
    job_id = api.submit(
        prompts=["hello there", "a b"],
        capture={"layers": "all", "positions": "all_prompt", "tag": "mine"},
    )
    hand.finish(job_id)
    return job_id


def test_the_manifest_says_what_is_in_every_file(api: Api, captured: str) -> None:
    manifest = api.http.get(f"/v1/captures/{captured}").json()
    assert manifest["status"] == "ok"
    assert manifest["rows"] == 24
    assert len(manifest["files"]) == 2
    first = manifest["files"][0]
    assert first["sites"] == {"post_block": [0, 1, 2, 3]}
    assert first["dtype"] == "float32"
    assert first["at"] == "before"
    assert first["positions"] == [0, 1, 2]
    assert first["token_ids"] == [1, 2, 3]
    assert first["name"] == "mine.p0000.pp0.safetensors"
    assert first["layout"] == "packed"
    assert first["offset"] == 0
    path = Path(manifest["root"]) / first["path"]
    assert path.parts[-3:] == ("mine", captured, "p0000.a1.pp0.safetensors")
    assert zlib.crc32(path.read_bytes()) == first["crc32"]


def test_an_unfinished_capture_is_pending_and_cannot_be_deleted(api: Api, hand: Hand) -> None:
    job_id = hand.claim(api.submit(capture={"layers": "all"})).job.id
    assert api.http.get(f"/v1/captures/{job_id}").json()["status"] == "pending"
    assert api.http.get(f"/v1/captures/{job_id}/safetensors").status_code == 409
    assert api.http.delete(f"/v1/captures/{job_id}").status_code == 409
    assert listed(api) == [job_id]


def test_a_job_without_a_capture_has_none_to_read_or_delete(api: Api, hand: Hand) -> None:
    for job_id in ("job_nobody", api.submit()):
        assert api.http.get(f"/v1/captures/{job_id}").status_code == 404
        assert api.http.delete(f"/v1/captures/{job_id}").status_code == 404


# field case 40
@pytest.mark.parametrize(
    "name",
    [
        "..%2f..%2f..%2fetc%2fpasswd",
        "%2e%2e",
        "p0000.a1.pp0.json",
        "..%2fredis%2fappendonly.aof",
        "p0000.a1.pp0.safetensors%00",
    ],
)
def test_capture_downloads_serve_only_files_of_the_job(api: Api, captured: str, name: str) -> None:
    assert api.http.get(f"/v1/captures/{captured}/files/{name}").status_code == 404


# field case 40
def test_a_receipt_that_names_a_path_outside_the_root_opens_nothing(api: Api, hand: Hand) -> None:
    (api.settings.capture_root.parent / "secret.safetensors").write_bytes(b"secret")
    claim = hand.claim(api.submit(capture={"layers": [0]}))
    hand.store(claim)
    hand.receipt(
        claim,
        files=[
            CapturedFile("../secret.safetensors", 6, 0, 1, sites={"post_block": [0]}, positions=1)
        ],
    )
    for path in ("", "/files/...p0000.pp0.safetensors", "/safetensors"):
        answer = api.http.get(f"/v1/captures/{claim.job.id}{path}")
        refused(answer, 500, None, "is not a capture file of job")


@pytest.mark.parametrize("where", ["folder", "segment"])
def test_a_receipt_that_names_another_jobs_blob_serves_none_of_it(
    api: Api, hand: Hand, captured: str, where: str
) -> None:
    claim = hand.claim(
        api.submit(capture={"layers": [0], "positions": "last_prompt", "tag": "mine"})
    )
    hand.store(claim)
    victim = api.http.get(f"/v1/captures/{captured}").json()["files"][0]
    if where == "folder":
        stolen = CapturedFile(
            victim["path"],
            victim["bytes"],
            victim["crc32"],
            1,
            sites={"post_block": [0]},
            positions=1,
            tag="mine",
        )
    else:  # shared by jobs, so the path alone does not identify the blob's job
        (stolen,) = write(
            api.settings.capture_root,
            finished("job_victim", positions=[0], tag="mine"),
            segment_limit=1 << 20,
        )
        assert stolen.path.startswith("mine/segments/")
    hand.receipt(claim, files=[stolen])
    for path in ("", "/files/mine.p0000.pp0.safetensors", "/safetensors"):
        answer = api.http.get(f"/v1/captures/{claim.job.id}{path}")
        assert answer.status_code == 500
        assert answer.json()["type"] == "urn:midstream:capture_failed"
        assert "job_victim" not in answer.text
    with Client(api.url) as client, refuses(kind="capture_failed"):
        client.capture(claim.job.id)


def damaged(answer: httpx2.Response, *says: str) -> None:
    """The bytes are not those that were written."""
    refused(answer, 500, None, *says, kind="capture_damaged")


# field case 39
def test_a_file_that_is_gone_is_410_and_not_an_empty_success(api: Api, captured: str) -> None:
    file = api.http.get(f"/v1/captures/{captured}").json()["files"][0]
    (api.settings.capture_root / file["path"]).unlink()
    assert api.http.get(file["url"]).status_code == 410
    assert api.http.get(f"/v1/captures/{captured}/safetensors").status_code == 410


def test_a_file_cut_short_is_an_error_and_not_a_short_answer(api: Api, captured: str) -> None:
    file = api.http.get(f"/v1/captures/{captured}").json()["files"][0]
    path = api.settings.capture_root / file["path"]
    path.write_bytes(path.read_bytes()[:-8])
    damaged(api.http.get(f"/v1/captures/{captured}/safetensors"))


def test_the_manifest_of_more_files_than_the_api_may_open_is_whole(api: Api, hand: Hand) -> None:
    job_id = api.submit(
        prompts=["hello"] * 150, capture={"layers": [1], "positions": "last_prompt"}
    )
    hand.finish(job_id)
    pid = api.process.pid
    few = len(os.listdir(f"/proc/{pid}/fd")) + 50
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (few, before[1]))
    try:
        answer = api.http.get(f"/v1/captures/{job_id}")
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    assert [file["request"] for file in answer.json()["files"]] == list(range(150))


# --- Captures that are not whole ---


def half(api: Api, hand: Hand) -> Claim:
    """A job of two prompts, of which the first has its rows."""
    claim = hand.claim(
        api.submit(
            prompts=["hello there"] * 2, capture={"hooks": {"post_block": "all"}, "tag": "mine"}
        )
    )
    hand.store(claim)
    whole = finished(claim.job.id, 0, {"post_block": [0, 1, 2, 3]}, tag="mine", requests=2)
    hand.receipt(
        claim, 0, files=write(hand.settings.capture_root, whole, owner=f"hand.{claim.job.id}.0")
    )
    return claim


def verified(api: Api, job_id: str) -> tuple[int, str]:
    done = CliRunner().invoke(
        main.app, ["check", "capture", job_id, "--url", api.url], env={"COLUMNS": "400"}
    )
    return done.exit_code, done.output


@pytest.mark.parametrize(("ends", "kind"), [(False, "conflict"), (True, "capture_failed")])
def test_incomplete_captures_need_partial_true(api: Api, hand: Hand, ends: bool, kind: str) -> None:
    claim = half(api, hand)
    if ends:
        hand.receipt(claim, 1, status="error", kind="capture_failed", message="the disk is full")
    job_id = claim.job.id
    status = "error" if ends else "pending"
    with Client(api.url) as client:
        for folder in (None, api.settings.capture_root.parent / "copy"):
            with refuses(match=f"status {status}", kind=kind):
                client.capture(job_id, folder)
        reader = client.capture(job_id, partial=True)
    assert reader.status == status
    assert reader.requests() == [0]
    assert [gap.detail.partition(":")[0] for gap in reader.gaps()] == [
        f"the status of the capture is {status}",
        f"job {job_id} captured 2 requests, but files exist for only 1",
    ]
    code, text = verified(api, job_id)
    assert code != 0, text
    assert f"the status of the capture is {status}" in text, text


def test_a_partial_capture_is_read_and_fails_its_verification(api: Api, hand: Hand) -> None:
    claim = half(api, hand)
    short = finished(
        claim.job.id, 1, {"post_block": [0, 1, 2, 3]}, [0, 2], tag="mine", dropped=(1,), requests=2
    )
    hand.receipt(
        claim, 1, files=write(hand.settings.capture_root, short, owner=f"hand.{claim.job.id}.1")
    )
    with Client(api.url) as client:
        reader = client.capture(claim.job.id)
    assert reader.status == "partial"
    assert reader.requests() == [0, 1]
    assert reader.positions(1) == [0, 2]
    assert reader.dropped(1) == [1]
    code, text = verified(api, claim.job.id)
    assert code != 0, text
    assert "request 1: positions dropped under overload: 1 (1 in total)" in text, text


# --- Layouts, hooks, tags ---

LAYOUTS = ["packed", "per_file", "segment"]
WHOLE = {"pre_attn": [1], "post_block": [0, 1, 2, 3]}
STAGES: list[dict[str, list[int]]] = [
    {"pre_attn": [1], "post_block": [0, 1]},
    {"post_block": [2, 3]},
]


def written(
    hand: Hand,
    claim: Claim,
    layout: str,
    tag: str = "mine",
    stages: int = 1,
    only: int | None = None,
) -> None:
    """Real files of every prompt and stage through the writer's own code, and the receipts that
    name them.
    """
    places = range(stages) if only is None else [only]
    for request in range(len(claim.job.prompts)):
        for pp in places:
            sites = WHOLE if stages == 1 else STAGES[pp]
            capture = finished(
                claim.job.id,
                request,
                sites,
                all_sites=WHOLE,
                pp=pp,
                stages=stages,
                layout=layout,
                tag=tag,
                attempt=claim.attempt,
            )
            files = write(
                hand.settings.capture_root, capture, owner=f"hand.{claim.job.id}.{request}.{pp}"
            )
            hand.receipt(claim, request, rank=pp, files=files)


def layered(api: Api, hand: Hand, layout: str, prompts: int = 2, tag: str = "mine") -> str:
    """A finished job whose captures lie in one layout."""
    hooks = {"pre_attn": [1], "post_block": "all"}
    claim = hand.claim(
        api.submit(prompts=["hello there"] * prompts, capture={"hooks": hooks, "tag": tag})
    )
    hand.store(claim)
    written(hand, claim, layout, tag)
    return claim.job.id


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blobs_of_every_layout_are_named_once_and_served_whole(
    api: Api, hand: Hand, layout: str
) -> None:
    job_id = layered(api, hand, layout)
    manifest = api.http.get(f"/v1/captures/{job_id}").json()
    names = [file["name"] for file in manifest["files"]]
    assert (len(names), len(set(names))) == ((10, 10) if layout == "per_file" else (2, 2))
    assert (
        "mine.p0001.pp0.pre_attn.1.safetensors"
        if layout == "per_file"
        else "mine.p0001.pp0.safetensors"
    ) in names
    for file in manifest["files"]:
        answer = api.http.get(file["url"])
        content = answer.content
        etag = answer.headers["etag"]
        assert answer.headers["content-type"] == "application/octet-stream"
        assert len(content) == file["bytes"]
        assert zlib.crc32(content) == file["crc32"]
        assert etag == f'"{file["crc32"]:08x}"'
        again = api.http.get(file["url"], headers={"If-None-Match": etag})
        assert again.status_code == 304
        assert again.content == b""
        lies = (Path(manifest["root"]) / file["path"]).read_bytes()
        assert lies[file["offset"] : file["offset"] + file["bytes"]] == content


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_prompts_rows_come_as_one_file_whatever_the_layout(
    api: Api, hand: Hand, layout: str
) -> None:
    job_id = layered(api, hand, layout)
    raw = api.http.get(f"/v1/captures/{job_id}/safetensors", params={"request": 1}).content
    reader = CaptureReader.from_bytes(raw)
    assert reader.requests() == [1]
    assert reader.hooks(1) == ["pre_attn", "post_block"]
    assert reader.layers(1) == [0, 1, 2, 3]
    np.testing.assert_array_equal(reader.array(1, "pre_attn", 1), values("pre_attn", 1, [0, 1, 2]))
    some = api.http.get(
        f"/v1/captures/{job_id}/safetensors", params={"hook": "resid_post", "layers": "0,2"}
    ).content
    assert CaptureReader.from_bytes(some).layers() == [0, 2]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_client_reads_every_layout_in_place_and_downloaded(
    api: Api, hand: Hand, layout: str, tmp_path: Path
) -> None:
    job_id = layered(api, hand, layout)
    with Client(api.url) as client:
        for reader in (client.capture(job_id), client.capture(job_id, tmp_path)):
            assert reader.requests() == [0, 1]
            assert all(check.ok for check in reader.verify())
            np.testing.assert_array_equal(
                reader.array(3, request=1), values("post_block", 3, [0, 1, 2])
            )
    assert all(path.parent == tmp_path for path in reader.files)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_flipped_bit_of_a_row_is_an_error_of_every_download(
    api: Api, hand: Hand, layout: str, tmp_path: Path
) -> None:
    job_id = layered(api, hand, layout, prompts=1)
    file = api.http.get(f"/v1/captures/{job_id}").json()["files"][-1]
    with (api.settings.capture_root / file["path"]).open("r+b") as blob:
        raw = bytearray(os.pread(blob.fileno(), file["bytes"], file["offset"]))
        first = 8 + int.from_bytes(raw[:8], "little")  # of the rows
        os.pwrite(blob.fileno(), bytes([raw[first] ^ 1]), file["offset"] + first)
    layer = file["sites"]["post_block"][-1]
    for url in (
        file["url"],
        f"/v1/captures/{job_id}/safetensors",
        f"/v1/captures/{job_id}/safetensors?hook=post_block&layers={layer}",
    ):
        damaged(api.http.get(url), "CRC32")
    with Client(api.url) as client:
        reader = client.capture(job_id)
        for read in (lambda: reader.array(layer), lambda: client.capture(job_id, tmp_path)):
            with refuses(kind="capture_damaged"):
                read()
        assert [check.ok for check in reader.verify()].count(False) == 1


def test_caveats_of_the_model_are_in_every_manifest(api: Api, hand: Hand) -> None:
    claim = hand.claim(
        api.submit(prompts=["hello there"] * 2, capture={"layers": [2], "tag": "mine"})
    )
    hand.store(claim)
    for request in range(2):
        capture = finished(
            claim.job.id,
            request,
            {"post_block": [2]},
            tag="mine",
            caveats=("rows of short prompts differ",),
        )
        hand.receipt(
            claim, request, files=write(api.settings.capture_root, capture, owner=f"hand.{request}")
        )
    assert api.http.get(f"/v1/captures/{claim.job.id}").json()["caveats"] == [
        "rows of short prompts differ"
    ]
    with Client(api.url) as client:
        reader = client.capture(claim.job.id)
    assert [reader.manifest(request).caveats for request in range(2)] == [
        ["rows of short prompts differ"]
    ] * 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_file_of_zeros_is_damaged_and_not_deleted(api: Api, hand: Hand, layout: str) -> None:
    job_id = layered(api, hand, layout, prompts=1)
    file = api.http.get(f"/v1/captures/{job_id}").json()["files"][-1]
    path = api.settings.capture_root / file["path"]
    path.write_bytes(bytes(path.stat().st_size))
    for url in (file["url"], f"/v1/captures/{job_id}/safetensors", f"/v1/captures/{job_id}"):
        damaged(api.http.get(url))
    with Client(api.url) as client, refuses(kind="capture_damaged"):
        client.capture(job_id)
    assert api.http.delete(f"/v1/captures/{job_id}").status_code == 204
    assert api.http.get(file["url"]).status_code == 410


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"layers": "9"}, "layers"),
        ({"layers": "3-1"}, "layers"),
        ({"request": "-1"}, "request"),
        ({"request": "7"}, "request"),
        ({"hook": "mlp_in"}, "hook"),
        ({"hook": "pre_attn", "layers": "2"}, "layers"),
        ({"tag": "no"}, "tag"),
    ],
)
def test_rows_that_were_not_captured_are_refused_by_parameter(
    api: Api, hand: Hand, parameters: dict[str, str], field: str
) -> None:
    path = f"/v1/captures/{layered(api, hand, 'segment')}/safetensors"
    unknown = parameters in ({"tag": "no"}, {"request": "7"})
    refused(api.http.get(path, params=parameters), 404 if unknown else 400, field)


# field case 18
def test_a_download_joins_stages_and_waits_for_those_that_are_not_durable(api: Api) -> None:
    with Hand(api.settings, ranks=[(0, 0), (0, 1)]) as hand:
        claim = hand.claim(
            api.submit(capture={"hooks": {"pre_attn": [1], "post_block": "all"}, "tag": "mine"})
        )
        hand.store(claim)
        url = f"/v1/captures/{claim.job.id}/safetensors"
        written(hand, claim, "segment", stages=2, only=0)
        assert api.http.get(url).status_code == 409
        early = api.http.get(url, params={"hook": "pre_attn"})  # durable already
        assert CaptureReader.from_bytes(early.content).layers(hook="pre_attn") == [1]
        written(hand, claim, "packed", stages=2, only=1)
        whole = api.http.get(url)
        assert int(whole.headers["content-length"]) == len(whole.content)
        joined = CaptureReader.from_bytes(whole.content)
        assert joined.layers() == [0, 1, 2, 3]
        for layer in joined.layers():
            np.testing.assert_array_equal(
                joined.array(layer), values("post_block", layer, [0, 1, 2])
            )


# --- Retention ---


def listed(api: Api, **parameters: Any) -> list[str]:
    """The ids of all pages, as `parameters` ask for them."""
    found = []
    cursor = None
    while True:
        page = api.http.get(
            "/v1/captures", params={**parameters, **({"cursor": cursor} if cursor else {})}
        ).json()
        found += [entry["job"] for entry in page["captures"]]
        cursor = page["next"]
        if cursor is None:
            return found


def test_captures_are_listed_newest_first_with_their_size(api: Api, hand: Hand) -> None:
    jobs = [
        layered(api, hand, layout, tag=tag)
        for layout, tag in (("packed", "a"), ("segment", "b"), ("per_file", "a"))
    ]
    api.submit()  # captures nothing
    newest, _, oldest = api.http.get("/v1/captures").json()["captures"]
    assert newest["job"] == jobs[2]
    assert oldest["job"] == jobs[0]
    manifest = api.http.get(f"/v1/captures/{jobs[0]}").json()
    assert oldest["status"] == "ok"
    assert oldest["tags"] == ["a"]
    assert oldest["bytes"] == manifest["bytes"]
    assert oldest["rows"] == manifest["rows"]
    assert oldest["rows"] == 2 * 5 * 3
    assert oldest["created"] == api.view(jobs[0])["created"]
    for limit in (1, 2, 3):
        assert listed(api, limit=limit) == jobs[::-1]
        assert listed(api, limit=limit, tag="a") == [jobs[2], jobs[0]]
    assert listed(api, tag="c") == []
    assert api.http.get("/v1/captures", params={"cursor": "x"}).json()["field"] == "cursor"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_deleted_captures_are_410_for_every_caller(api: Api, hand: Hand, layout: str) -> None:
    job_id = layered(api, hand, layout)
    other = layered(api, hand, layout)
    urls = [file["url"] for file in api.http.get(f"/v1/captures/{job_id}").json()["files"]]
    answer = api.http.delete(f"/v1/captures/{job_id}")
    assert answer.status_code == 204
    assert answer.content == b""
    for url in (f"/v1/captures/{job_id}", f"/v1/captures/{job_id}/safetensors", *urls):
        refused(api.http.get(url), 410, kind="gone")
    assert api.http.delete(f"/v1/captures/{job_id}").status_code == 410
    assert listed(api) == [other]
    with pytest.raises(MidstreamError):
        CaptureReader(api.settings.capture_root, job_id)
    assert CaptureReader(api.settings.capture_root, other).requests() == [0, 1]
    assert api.view(job_id)["state"] == "succeeded"  # the job's record stays


def test_capture_bytes_exclude_abandoned_attempts(api: Api, hand: Hand) -> None:
    job_id = api.submit(capture={"hooks": {"post_block": "all"}, "tag": "mine"})
    claim = hand.claim(job_id)
    written(hand, claim, "packed")
    hand.do(hand.ledger.release(job_id, claim.attempt))
    assert api.http.get("/v1/captures").json()["captures"][0]["bytes"] == 0
    hand.finish(job_id)
    assert (
        api.http.get("/v1/captures").json()["captures"][0]["bytes"]
        == api.http.get(f"/v1/captures/{job_id}").json()["bytes"]
    )


def test_a_deletion_does_not_interrupt_a_download(api: Api, hand: Hand) -> None:
    """A blob of 24 MiB in a segment: far more than the buffers between here and the server."""
    claim = hand.claim(api.submit(capture={"layers": [2], "tag": "mine", "layout": "segment"}))
    hand.store(claim)
    positions = range(1 << 19)
    rows = np.arange(len(positions) * CAPTURED_SIZE, dtype=np.float32)
    large = finished(
        claim.job.id,
        sites={"post_block": [2]},
        positions=positions,
        layout="segment",
        tag="mine",
        dtype="float32",
        rows=lambda hook, layer: [memoryview(rows.tobytes())],
    )
    (file,) = write(api.settings.capture_root, large, owner=f"hand.{claim.job.id}")
    hand.receipt(claim, files=[file])
    name = "mine.p0000.pp0.safetensors"
    with api.http.stream("GET", f"/v1/captures/{claim.job.id}/files/{name}") as answer:
        chunks = answer.iter_raw()
        content = [next(chunks)]
        assert api.http.delete(f"/v1/captures/{claim.job.id}").status_code == 204
        assert api.http.get(f"/v1/captures/{claim.job.id}/files/{name}").status_code == 410
        content += chunks
    assert zlib.crc32(b"".join(content)) == file.crc32
    blob = api.settings.capture_root / file.path
    assert blob.stat().st_blocks > 0
    hand.do(LedgerCaptures(hand.ledger).sweep(now() + 3600))
    assert not blob.exists()


def test_captures_beyond_the_quota_are_refused_and_other_jobs_are_not(
    redis_url: str, tmp_path: Path
) -> None:
    (tmp_path / "captures").mkdir()
    (tmp_path / "captures" / "earlier").write_bytes(bytes(2 << 20))
    with (
        running(tmp_path, redis_url, capture_quota_mib=1) as api,
        Hand(api.settings, grades=True) as hand,
    ):
        captures = {"model": "tiny", "prompts": ["a"], "capture": {"layers": "all"}}
        # its rows go into files, too
        sweep = {"model": "tiny", "pairs": [{"clean": "a b", "corrupt": "a c", "answer": " d"}]}
        for path, body in (("/v1/jobs", captures), ("/v1/sweeps", sweep)):
            refused(api.http.post(path, json=body), 507, None, "2 of 1 MiB", kind="quota_exceeded")
        assert hand.count_jobs() == 0
        api.submit()
        api.submit(capture={"layers": [0], "consumers": ["memory"]})


def test_captures_past_their_ttl_are_deleted(api: Api, hand: Hand) -> None:
    old = layered(api, hand, "segment")
    running_job = api.submit(capture={"layers": "all"})
    file, _ = api.http.get(f"/v1/captures/{old}").json()["files"]
    created = api.view(old)["created"]
    with Hand(msgspec.structs.replace(api.settings, capture_ttl_s=1000)) as expiring:
        captures = LedgerCaptures(expiring.ledger)
        assert expiring.do(captures.sweep(at=created + 999)) == []
        assert expiring.do(captures.sweep(at=created + 1_000_000)) == [old]
    assert api.http.get(f"/v1/captures/{old}").status_code == 410
    assert listed(api) == [running_job]
    assert not (api.settings.capture_root / file["path"]).exists()
