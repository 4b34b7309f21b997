"""Large files are written past the page cache, byte for byte; files without a name become objects
once, or nothing is left of them.
"""

import errno
import itertools
import os
from pathlib import Path

import numpy as np
import pytest

from midstream.storage.direct_write import LEAST, DirectWriter
from midstream.storage.file_store import FileStore, _write_at, scratch


def pieces(size: int, count: int = 1700) -> list[memoryview]:
    """`size` random bytes in buffers of unequal sizes, none of them aligned."""
    data = memoryview(np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8))
    cuts = [0, *sorted(np.random.default_rng(1).integers(1, size, count).tolist()), size]
    return [data[first:stop] for first, stop in itertools.pairwise(cuts)]


@pytest.mark.parametrize("size", [LEAST - 1, LEAST, LEAST + 1, (9 << 20) + 4097])
def test_large_files_hold_what_was_appended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    flags: list[bool] = []
    opening = os.open

    def noted(path: str, given: int, *more: int, **options: int) -> int:
        if str(path).endswith(".tmp"):
            flags.append(bool(given & os.O_DIRECT))
        return opening(path, given, *more, **options)

    monkeypatch.setattr(os, "open", noted)
    writer = FileStore(tmp_path).writer()
    parts = pieces(size)
    writer.append("t/j/a", parts)
    writer.append("t/j/b", [b"small"])
    writer.commit()
    assert any(flags) == (size >= LEAST)
    assert (tmp_path / "t/j/a").read_bytes() == b"".join(parts)
    assert (tmp_path / "t/j/b").read_bytes() == b"small"


def test_where_the_disk_takes_no_direct_writes_the_page_cache_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unable(*_: object) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(DirectWriter, "_copy", unable)
    writer = FileStore(tmp_path).writer()
    parts = pieces(LEAST)
    writer.append("t/j/a", parts)
    writer.commit()
    assert (tmp_path / "t/j/a").read_bytes() == b"".join(parts)


def test_a_disk_that_fills_up_during_a_direct_write_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, buffers: list[memoryview], offset: int) -> None:
        if offset:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        _write_at(descriptor, buffers, offset)

    with pytest.raises(OSError, match="No space left"):
        DirectWriter(full).write(tmp_path / "a", pieces(9 << 20))
    assert (tmp_path / "a").stat().st_size == 0


def test_a_draft_becomes_an_object_when_it_is_committed_and_not_before(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    draft = store.draft("t/j/a.bin")
    draft.write(4096, [b"end"])
    draft.write(0, [b"be", b"gin"])
    assert store.children("t/j/") == []
    assert draft.read(4096, 3) == b"end"
    writer = store.writer()
    writer.adopt("t/j/a.bin", draft)
    assert not draft.adoptable
    assert store.children("t/j/") == []
    writer.commit()
    assert store.children("t/j/") == ["t/j/a.bin"]
    assert (
        (tmp_path / "t/j/a.bin").read_bytes()
        == bytes(draft.view())
        == b"begin" + bytes(4091) + b"end"
    )


def test_nothing_is_left_of_a_draft_that_is_dropped_or_aborted(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    dropped = store.draft("t/j/a")
    aborted = store.draft("t/j/b")
    for draft in (dropped, aborted, scratch(tmp_path / "spill")):
        draft.write(0, [bytes(1 << 20)])
    writer = store.writer()
    writer.adopt("t/j/b", aborted)
    writer.abort()
    view = aborted.view()
    del dropped, aborted, draft, writer
    assert bytes(view[:8]) == bytes(8), "a view outlives its draft"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    del view
    assert store.used() < 1 << 20


def test_a_file_system_without_unnamed_files_has_no_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "open", refuse)
    assert FileStore(tmp_path).draft("t/j/a") is None
