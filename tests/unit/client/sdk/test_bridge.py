"""Does a folder of a trainer have the documents of one harvest, each once and durable?"""

from pathlib import Path

import numpy as np
import pytest

from midstream.client.harvest.exports import Tensor
from midstream.client.sdk import bridge
from midstream.client.sdk.bridge import Folder
from midstream.schemas.base.errors import MidstreamError


def sample(document: int) -> tuple[int, list[Tensor]]:
    return document, [("token_ids", "int64", np.array([document]))]


def waiting(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("hs_*.safetensors"))


def test_a_folder_of_another_harvest_is_refused_and_keeps_its_files(tmp_path: Path) -> None:
    """Documents and units of two harvests have the same numbers."""
    first, folder = Folder(tmp_path, "a"), tmp_path
    first.put(1, [sample(0)])
    with pytest.raises(MidstreamError, match="has documents of another harvest"):
        Folder(folder, "b").put(1, [sample(0), sample(1)])
    assert waiting(folder) == ["hs_0.safetensors"]
    (folder / "hs_0.safetensors").unlink()
    first.put(1, [sample(0)])
    assert waiting(folder) == [], "taken, and not written again"
    first.put(2, [sample(1)])
    with pytest.raises(MidstreamError, match="another harvest"):
        Folder(folder, "b").put(2, [sample(1)])
    (folder / "harvest-a" / "unit-2").rmdir()
    (folder / "harvest-a").rmdir()
    with pytest.raises(MidstreamError, match="another harvest"):
        Folder(folder, "b").put(2, [sample(1)])
    assert not (folder / "harvest-b").exists()


def test_the_names_of_a_unit_are_durable_before_it_is_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(bridge, "sync", lambda path: synced.append((path.name, waiting(folder))))
    folder = tmp_path / "in"
    Folder(folder, "a").put(1, [sample(0)])
    assert synced[-2:] == [("harvest-a", []), ("in", ["hs_0.safetensors"])]
