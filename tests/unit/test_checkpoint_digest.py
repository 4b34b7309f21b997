"""The digest of a model tells checkpoints apart, whatever their names and places."""

from pathlib import Path

import pytest

from midstream.workers.engine import checkpoint
from midstream.workers.engine.checkpoint import digest_of


def folder(path: Path, weights: bytes, config: bytes = b"{}") -> Path:
    path.mkdir()
    (path / "config.json").write_bytes(config)
    (path / "model.safetensors").write_bytes(weights)
    return path


def test_the_digest_follows_the_files_and_not_the_place(tmp_path: Path) -> None:
    first = digest_of(str(folder(tmp_path / "a", b"weights")))
    assert len(first) == 64
    assert digest_of(str(folder(tmp_path / "b", b"weights"))) == first
    assert digest_of(str(folder(tmp_path / "c", b"weightz"))) != first
    assert digest_of(str(folder(tmp_path / "d", b"weights", b"[]"))) != first


def test_large_files_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_WHOLE", 64), ("_PIECE", 16), ("_STRIDE", 128)):
        monkeypatch.setattr(checkpoint, name, value)
    weights = bytes(1000)
    first = digest_of(str(folder(tmp_path / "a", weights)))
    assert digest_of(str(folder(tmp_path / "b", weights[:256] + b"\1" * 200 + weights[456:]))) != first
    assert digest_of(str(folder(tmp_path / "c", weights + b"\0"))) != first


def test_a_file_and_a_hub_name_have_digests_too(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    assert len(digest_of(str(file))) == 64
    assert digest_of("some/model", "0123") != digest_of("some/model", "4567")
    assert digest_of("some/model") == ""
