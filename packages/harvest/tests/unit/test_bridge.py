"""Does a folder of a trainer have the documents of one harvest, each once and durable?"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from midstream.schemas.base.errors import MidstreamError
from midstream_harvest.client import bridge
from midstream_harvest.client.bridge import TransferFolder

#: Documents and units of all harvests are numbered from 0.
SAMPLES = [(0, [("token_ids", "int64", np.array([7]))])]


def test_a_folder_has_the_documents_of_one_harvest_and_their_names_are_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "in"
    synced = list[Any]()
    file = folder / "hs_0.safetensors"
    monkeypatch.setattr(bridge, "sync", lambda *paths: synced.append((*paths, file.exists())))
    TransferFolder(folder, "a").put(1, SAMPLES)
    assert synced == [(folder / "harvest-a", False), (folder, tmp_path, True)]
    for taken in (False, True):
        with pytest.raises(MidstreamError, match="has documents of another harvest"):
            TransferFolder(folder, "b").put(1, SAMPLES)
        file.unlink(missing_ok=taken)
        TransferFolder(folder, "a").put(1, SAMPLES)
        assert not file.exists(), "a file that was taken is not written again"
