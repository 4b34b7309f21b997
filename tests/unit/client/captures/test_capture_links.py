"""Manifests of captures in a bucket have links that open one job's rows and no others', and
submissions are refused while it is away.
"""

import zlib
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import msgspec
import pytest
import s3_kit
from capture_kit import finished, write
from refusal_kit import refuses
from s3_kit import FaultProxy

from midstream.api.operations.disks import Disks
from midstream.api.routes.captures import _described
from midstream.schemas.jobs.captures import ManifestFile
from midstream.schemas.jobs.jobs import FileEntry, Job, Sampling, StoredPrompt
from midstream.schemas.jobs.receipts import CapturedFile
from midstream.schemas.requests.specs import StoredCapture
from midstream.schemas.settings.settings import Settings
from midstream.storage.store import ArtifactStore, open_store


def described(
    store: ArtifactStore, files: list[CapturedFile], **settings: Any
) -> list[ManifestFile]:
    context: Any = SimpleNamespace(settings=Settings(**settings), store=store, url=str)
    told = [msgspec.structs.asdict(file) for file in files]
    names = set(FileEntry.__struct_fields__)
    entries = [
        FileEntry(
            **{name: value for name, value in one.items() if name in names}
            | {"request": 0, "rank": 0, "pp": 0}
        )
        for one in told
    ]
    return _described(context, "job_x", entries)[0]


@pytest.mark.parametrize("layout", ["packed", "per_file", "segment"])
def test_an_object_of_one_job_has_a_link_and_a_segment_has_none(
    s3: FaultProxy, layout: str
) -> None:
    store = open_store(s3_kit.uri(s3))
    for file in described(store, write(store, finished(layout=layout))):
        if layout == "segment":
            assert file.link is None
            continue
        assert file.link is not None
        with urlopen(file.link) as answer:
            assert zlib.crc32(answer.read()) == file.crc32


@pytest.mark.parametrize(
    "settings", [{"artifact_links": "api"}, {"artifact_public_endpoint": "https://store.example"}]
)
def test_links_are_as_the_settings_say(s3: FaultProxy, settings: dict[str, str]) -> None:
    store = open_store(s3_kit.uri(s3))
    (file,) = described(store, write(store, finished(layout="packed")), **settings)
    assert (file.link or "").startswith(settings.get("artifact_public_endpoint", ""))
    assert (file.link is None) == (settings.get("artifact_links") == "api")


@pytest.mark.parametrize("store", ["folder"], indirect=True)
def test_files_on_a_disk_have_no_link(store: ArtifactStore) -> None:
    assert [file.link for file in described(store, write(store, finished(layout="packed")))] == [
        None
    ]


async def test_a_job_with_captures_is_refused_with_the_reason_while_the_bucket_refuses(
    s3: FaultProxy,
) -> None:
    store = open_store(s3_kit.uri(s3))
    s3.keys = {s3_kit.ACCESS_KEY: "rotated"}
    job = Job(
        id="job_x",
        kind="generate",
        model="m",
        prompts=[StoredPrompt(token_ids=[1])],
        sampling=Sampling(),
        created=0.0,
    )
    capturing = msgspec.structs.replace(
        job, captures=[[StoredCapture(sites={"post_block": [0]}, positions="all", tag="t")]]
    )
    disks = Disks(Settings(data_dir="/nowhere"), store)
    await disks.check(job)
    with refuses("secret key does not belong to the access key", kind="unavailable"):
        await disks.check(capturing)
