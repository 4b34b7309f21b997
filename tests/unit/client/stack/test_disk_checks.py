"""The doctor's checks of folders."""

from pathlib import Path

import pytest

from midstream.client.stack.checks.disk_checks import _memory

MOUNTS = """\
/dev/vda / ext4 rw,relatime 0 0
tmpfs /dev/shm tmpfs rw,nosuid,nodev 0 0
tmpfs /dev/shm/fast tmpfs rw,relatime,huge=always 0 0
"""


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
