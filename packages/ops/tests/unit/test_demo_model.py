"""Is a checkpoint in the cache taken only when it is whole?

(Making it is tested by those who use it.)
"""

import json
from pathlib import Path

import pytest

from midstream.schemas.base.errors import MidstreamError
from midstream_ops import demo_model


@pytest.fixture
def cached(tmp_path: Path) -> Path:
    """A sealed folder in the place of the demo model."""
    folder = tmp_path / "models" / demo_model.MODEL_NAME
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    demo_model._seal(folder)
    return folder


def test_a_whole_checkpoint_is_taken_without_fetching(cached: Path, tmp_path: Path) -> None:
    said: list[str] = []
    assert demo_model.fetch_demo_model(tmp_path, said.append, verify=True) == cached
    assert said == []


def test_a_file_of_another_size_is_not_whole(cached: Path) -> None:
    (cached / "model.safetensors").write_bytes(b"weight")
    assert not demo_model.is_complete(cached)


def test_a_changed_byte_is_found_when_asked_for(cached: Path) -> None:
    (cached / "model.safetensors").write_bytes(b"Weights")
    assert demo_model.is_complete(cached)
    assert not demo_model.is_complete(cached, verify=True)


def test_a_folder_without_its_marker_is_not_whole(cached: Path) -> None:
    (cached / demo_model.MARKER).unlink()
    assert not demo_model.is_complete(cached)


def test_the_marker_names_where_the_weights_come_from(cached: Path) -> None:
    marker = json.loads((cached / demo_model.MARKER).read_text())
    assert marker["package"] == f"{demo_model.PACKAGE}=={demo_model.PACKAGE_VERSION}"
    assert set(marker["files"]) == {"config.json", "model.safetensors"}


def test_other_weights_than_the_known_ones_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF of somebody else")
    monkeypatch.setattr(demo_model, "_installed_gguf", lambda: other)
    with pytest.raises(MidstreamError, match=r"other\.gguf .*SHA-256"):
        demo_model.fetch_demo_model(tmp_path / "cache")
    assert [
        path
        for path in (tmp_path / "cache" / "models").iterdir()
        if not path.name.endswith(".lock")
    ] == []
