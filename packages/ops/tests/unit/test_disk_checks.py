"""The doctor's checks of folders."""

import resource
import shutil
from pathlib import Path

import pytest

from midstream.schemas.settings.settings import Settings
from midstream_ops.checks import disk_checks
from midstream_ops.checks.disk_checks import _memory
from midstream_ops.checks.service import Service

MOUNTS = """\
/dev/vda / ext4 rw,relatime 0 0
tmpfs /dev/shm tmpfs rw,nosuid,nodev 0 0
tmpfs /dev/shm/fast tmpfs rw,relatime,huge=always 0 0
"""


@pytest.mark.parametrize(("room", "advice"), [(1 << 20, "delete captures"), (4096, "by hand")])
def test_the_doctor_sends_to_the_files_while_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, advice: str
) -> None:
    """The kernel refuses what exceeds `room`, as on a full disk."""
    monkeypatch.setattr(disk_checks, "DISK_FAIL", 1 << 62)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        space = next(disk_checks._disk(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert space.level == "fail"
    assert advice in space.advice


@pytest.mark.parametrize(("mib", "level"), [(239, "fail"), (240, "ok")])
def test_the_doctor_warns_of_shared_memory_that_no_engine_fits_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mib: int, level: str
) -> None:
    free = shutil.disk_usage("/")._replace(free=mib << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    service = Service(Settings(data_dir=str(tmp_path)), "", "")
    found = {each.about: each for each in disk_checks.data_disk(service)}
    assert found["shared memory"].level == level


def test_the_doctor_does_not_say_by_its_own_settings_whether_adapters_are_served(
    tmp_path: Path,
) -> None:
    settings = Settings(data_dir=str(tmp_path))
    folders = next(disk_checks.data_disk(Service(settings, "", "")))
    said = folders.found.partition("registered from ")[2]
    assert said.split(", ") == [f"{tmp_path}/{kind}" for kind in ("loras", "lenses", "saes")]


@pytest.mark.parametrize(
    ("folder", "found"),
    [
        ("/var/lib/midstream", []),
        ("/dev/shmem", []),
        ("/dev/shm/midstream", ["/dev/shm has pages of 4 KiB"]),
        ("/dev/shm/fast/midstream", ["/dev/shm/fast has huge pages"]),
    ],
)
def test_the_doctor_says_which_pages_a_folder_in_memory_has(
    tmp_path: Path, folder: str, found: list[str]
) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(MOUNTS)
    assert [each.found.split(":")[0] for each in _memory(Path(folder), mounts)] == found
