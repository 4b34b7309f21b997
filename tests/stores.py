"""Fixtures of artifact stores: each that keeps the protocol, and a server of buckets."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from s3_kit import FaultProxy

    from midstream.storage.store import ArtifactStore


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> "ArtifactStore":
    """Every store that keeps the protocol: the local folder, and a bucket of an S3 server."""
    from midstream.storage.store import open_store

    place: Path | str = tmp_path / "captures"
    if request.param == "s3":
        import s3_kit

        place = s3_kit.uri(request.getfixturevalue("s3"))
    made = open_store(place)
    made.prepare()
    return made


def _served() -> "Iterator[FaultProxy]":
    """An S3 server that checks signatures; this process has the credentials."""
    import s3_kit

    with s3_kit.s3_server() as made, pytest.MonkeyPatch.context() as patch:
        for name, value in s3_kit.ENVIRONMENT.items():
            patch.setenv(name, value)
        yield made


#: A server for one test, and one for all tests of a module.
s3 = pytest.fixture(_served, name="s3")
proxy = pytest.fixture(_served, scope="module", name="proxy")
