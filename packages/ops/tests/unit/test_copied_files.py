"""Copies that are cut off go on where they were."""

from pathlib import Path

import pytest

from midstream_ops.upkeep.copied_files import FileList, copy_new, digest_of, files_below


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "tag").mkdir(parents=True)
    (folder / ".deleted").mkdir()
    (folder / ".deleted" / "job").touch()
    (folder / "tag" / "one").write_bytes(b"1" * 10)
    (folder / "tag" / ".draft").touch()
    (folder / "tag" / "two").write_bytes(b"2" * 20)
    (folder / "link").symlink_to(folder / "tag" / "one")
    return folder


def test_only_what_is_complete_is_copied(source: Path, tmp_path: Path) -> None:
    assert list(files_below(source)) == [("tag/one", 10), ("tag/two", 20)]
    known = FileList(tmp_path / "files.jsonl")
    assert copy_new(source, tmp_path / "copy", "captures", known) == 0
    copied = tmp_path / "copy" / "captures" / "tag" / "two"
    assert copied.read_bytes() == b"2" * 20
    assert known.files["captures/tag/two"].sha256 == digest_of(copied)


def test_a_second_call_copies_only_what_is_new_or_has_grown(source: Path, tmp_path: Path) -> None:
    listed = tmp_path / "files.jsonl"
    copy_new(source, tmp_path / "copy", "captures", FileList(listed))
    with listed.open("ab") as lines:
        lines.write(b'{"path": "half')
    (source / "tag" / "two").write_bytes(b"2" * 30)
    (source / "tag" / "three").write_bytes(b"3")
    taken: list[int] = []
    copy_new(source, tmp_path / "copy", "captures", FileList(listed), taken.append)
    assert taken == [1, 30]
    again = FileList(listed)
    assert again.files["captures/tag/two"].bytes == 30
    assert len(again.files) == 3
