"""Can captured tensors be found and fetched over HTTP, bit for bit, and nothing else of the disk?"""

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from edge import HIDDEN, Api, Hand

from midstream.schemas.receipts import CapturedFile


@pytest.fixture
def captured(api: Api, hand: Hand) -> str:
    """A finished job: two prompts of three tokens, all layers, one stage."""
    job_id = api.submit(prompts=["hello there", "a b"], capture={"layers": "all", "positions": "all_prompt", "tag": "mine"})
    hand.finish(job_id)
    return job_id


@pytest.fixture
def staged(api: Api) -> str:
    """A finished job of two pipeline stages."""
    hand = Hand(api.settings, ranks=[(0, 0), (0, 1)])
    hand.serve()
    job_id = api.submit(capture={"layers": "all", "positions": "all_prompt"})
    hand.finish(job_id)
    hand.close()
    return job_id


def rows(layer: int, count: int = 3) -> np.ndarray:
    """What `Hand.capture` writes for a layer."""
    return np.repeat((100 * layer + np.arange(count, dtype=np.float32))[:, None], HIDDEN, axis=1)


def test_the_manifest_says_what_is_in_every_file(api: Api, captured: str) -> None:
    manifest = api.http.get(f"/v1/captures/{captured}").json()
    assert (manifest["status"], manifest["rows"], len(manifest["files"])) == ("ok", 24, 2)
    first = manifest["files"][0]
    assert (first["hook"], first["dtype"], first["layers"]) == ("post_block", "float32", [0, 1, 2, 3])
    assert (first["positions"], first["token_ids"]) == ([0, 1, 2], [1, 2, 3])
    path = Path(manifest["root"]) / first["path"]
    assert path.parts[-3:] == ("mine", captured, first["name"])
    assert zlib.crc32(path.read_bytes()) == first["crc32"]


def test_a_file_is_served_bit_for_bit_under_its_crc(api: Api, captured: str) -> None:
    for file in api.http.get(f"/v1/captures/{captured}").json()["files"]:
        answer = api.http.get(file["url"])
        assert (answer.status_code, len(answer.content)) == (200, file["bytes"])
        assert zlib.crc32(answer.content) == file["crc32"]
        assert answer.headers["etag"] == f'"{file["crc32"]:08x}"'
        assert answer.headers["content-type"] == "application/octet-stream"
        again = api.http.get(file["url"], headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


def test_one_prompts_layers_come_as_one_safetensors(api: Api, captured: str) -> None:
    tensors = safetensors.numpy.load(api.http.get(f"/v1/captures/{captured}/safetensors", params={"request": 1}).content)
    assert sorted(tensors) == ["positions", "post_block.0", "post_block.1", "post_block.2", "post_block.3", "token_ids"]
    np.testing.assert_array_equal(tensors["token_ids"], [1, 9, 10])
    np.testing.assert_array_equal(tensors["post_block.2"], rows(2))


def test_the_files_of_pipeline_stages_are_joined(api: Api, staged: str) -> None:
    assert len(api.http.get(f"/v1/captures/{staged}").json()["files"]) == 2
    answer = api.http.get(f"/v1/captures/{staged}/safetensors")
    assert int(answer.headers["content-length"]) == len(answer.content)
    tensors = safetensors.numpy.load(answer.content)
    for layer in range(4):
        np.testing.assert_array_equal(tensors[f"post_block.{layer}"], rows(layer))
    np.testing.assert_array_equal(tensors["positions"], [0, 1, 2])


@pytest.mark.parametrize(("chosen", "layers"), [("2", [2]), ("0,3", [0, 3]), ("1-2", [1, 2]), ("0, 2-3", [0, 2, 3])])
def test_chosen_layers_come_alone(api: Api, staged: str, chosen: str, layers: list[int]) -> None:
    tensors = safetensors.numpy.load(api.http.get(f"/v1/captures/{staged}/safetensors", params={"layers": chosen}).content)
    assert sorted(tensors) == sorted(["positions", "token_ids", *(f"post_block.{layer}" for layer in layers)])
    for layer in layers:
        np.testing.assert_array_equal(tensors[f"post_block.{layer}"], rows(layer))


@pytest.mark.parametrize(
    ("parameters", "status", "field"),
    [
        ({"layers": "9"}, 400, "layers"),
        ({"layers": "x"}, 400, "layers"),
        ({"layers": "3-1"}, 400, "layers"),
        ({"request": "-1"}, 400, "request"),
        ({"request": "7"}, 404, "request"),
    ],
)
def test_a_wrong_choice_is_named(api: Api, captured: str, parameters: dict[str, Any], status: int, field: str) -> None:
    answer = api.http.get(f"/v1/captures/{captured}/safetensors", params=parameters)
    assert (answer.status_code, answer.json()["field"]) == (status, field)


def test_a_capture_still_on_its_way_is_pending_and_its_tensors_a_conflict(api: Api, hand: Hand) -> None:
    job_id = api.submit(capture={"layers": "all"})
    assert api.http.get(f"/v1/captures/{job_id}").json()["status"] == "pending"
    assert api.http.get(f"/v1/captures/{job_id}/safetensors").status_code == 409


def test_a_job_without_a_capture_has_no_manifest(api: Api, hand: Hand) -> None:
    assert api.http.get(f"/v1/captures/{api.submit()}").status_code == 404
    assert api.http.get("/v1/captures/job_nobody").status_code == 404


# field case 40
@pytest.mark.parametrize(
    "name", ["..%2f..%2f..%2fetc%2fpasswd", "%2e%2e", "p0000.a1.pp0.json", "..%2fredis%2fappendonly.aof", "p0000.a1.pp0.safetensors%00"]
)
def test_nothing_but_the_jobs_own_files_is_served(api: Api, captured: str, name: str) -> None:
    assert api.http.get(f"/v1/captures/{captured}/files/{name}").status_code == 404


# field case 40
def test_a_receipt_that_names_a_path_outside_the_root_opens_nothing(api: Api, hand: Hand) -> None:
    (api.settings.capture_root.parent / "secret.safetensors").write_bytes(b"secret")
    claim = hand.claim(api.submit(capture={"layers": [0]}))
    hand.store(claim)
    hand.receipt(claim, files=[CapturedFile("../secret.safetensors", 6, 0, 1, [0], 1)])
    for path in ("", "/files/secret.safetensors", "/safetensors"):
        answer = api.http.get(f"/v1/captures/{claim.job.id}{path}")
        assert answer.status_code == 500
        assert "inside the capture root" in answer.json()["detail"]


# field case 39
def test_a_file_that_is_gone_is_410_and_not_an_empty_success(api: Api, captured: str) -> None:
    file = api.http.get(f"/v1/captures/{captured}").json()["files"][0]
    (api.settings.capture_root / file["path"]).unlink()
    assert api.http.get(file["url"]).status_code == 410
    assert api.http.get(f"/v1/captures/{captured}/safetensors").status_code == 410


def test_a_file_cut_short_is_an_error_and_not_a_short_answer(api: Api, staged: str) -> None:
    file = api.http.get(f"/v1/captures/{staged}").json()["files"][1]
    path = api.settings.capture_root / file["path"]
    path.write_bytes(path.read_bytes()[:-8])
    answer = api.http.get(f"/v1/captures/{staged}/safetensors")
    assert (answer.status_code, answer.json()["type"]) == (500, "urn:midstream:capture_failed")


def test_the_manifest_of_a_large_ticket_is_whole(api: Api, hand: Hand) -> None:
    job_id = api.submit(prompts=["hello"] * 200, capture={"layers": [1], "positions": "last_prompt"})
    hand.finish(job_id)
    manifest = api.http.get(f"/v1/captures/{job_id}").json()
    assert sorted(file["request"] for file in manifest["files"]) == list(range(200))
