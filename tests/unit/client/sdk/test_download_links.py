"""A capture file is taken from the store by its link where that works, checked, and without the
API's key.
"""

import zlib
from pathlib import Path

import http_kit
import pytest

from midstream.client.sdk.answers.download import from_link, in_place
from midstream.client.sdk.wire import Manifest, ManifestFile

CONTENT = b"rows of a capture"


def file(link: str | None) -> ManifestFile:
    return ManifestFile(
        "t.p0000.pp0.safetensors",
        "t/job_x/p.safetensors",
        len(CONTENT),
        zlib.crc32(CONTENT),
        link=link,
    )


def test_a_file_is_saved_and_checked(tmp_path: Path) -> None:
    with http_kit.server((200, {}, CONTENT)) as (url, seen):
        path = from_link(tmp_path, "job_x", file(f"{url}/bucket/p?X-Amz-Signature=1"))
    assert path is not None
    assert path.read_bytes() == CONTENT
    assert seen == ["GET /bucket/p?X-Amz-Signature=1"]


@pytest.mark.parametrize(
    "reply",
    [
        (403, {}, b"expired"),
        (200, {}, b"other bytes"),
        (200, {}, b""),
        (302, {"location": "/x"}, b""),
    ],
)
def test_a_link_that_does_not_work_is_left_to_the_api(
    tmp_path: Path, reply: http_kit.Reply
) -> None:
    with http_kit.server(reply) as (url, _):
        assert from_link(tmp_path, "job_x", file(f"{url}/bucket/p")) is None
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize("link", [None, "http://127.0.0.1:1/p", "nonsense", "file:///etc/passwd"])
def test_no_server_is_no_error(tmp_path: Path, link: str | None) -> None:
    assert from_link(tmp_path, "job_x", file(link)) is None


def test_a_bucket_is_not_opened_for_want_of_credentials_that_are_the_servers() -> None:
    assert in_place(Manifest("ok", [file(None)], "s3://bucket/prefix"), "job_x") == []
