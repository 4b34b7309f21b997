"""The order of a row's dimensions by how far two prompts differ in them, read from the files of all
ranks.
"""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from midstream.schemas.jobs.captures import FORMAT, Manifest
from midstream.schemas.model.banks import RowShape
from midstream.schemas.requests.source_runs import RunFile, RunFiles
from midstream.storage.formats.capture_blobs import encode_header
from midstream.storage.store import open_store
from midstream.workers.serving.sweep_neurons import order_by_difference

SITE = ("mlp_act", 2)


def blob(folder: Path, name: str, rows: np.ndarray, columns: list[int]) -> RunFile:
    """One rank's columns of the rows."""
    fields = {field.name: field for field in msgspec.structs.fields(Manifest)}
    manifest = msgspec.convert(
        {
            name: {}
            if str(field.type).startswith("dict")
            else []
            if str(field.type).startswith("list")
            else ""
            if field.type is str
            else 0
            for name, field in fields.items()
            if field.required
        },
        Manifest,
    )
    manifest.format, manifest.row, manifest.columns = FORMAT, RowShape(1, 4), columns
    part = rows[:, columns[0] : columns[1]].astype("<f4")
    raw = (
        encode_header([("mlp_act.2", "F32", list(part.shape), part.nbytes)], manifest)
        + part.tobytes()
    )
    (folder / name).write_bytes(raw)
    return RunFile(path=name, offset=0, bytes=len(raw), crc32=0)


def run(folder: Path, key: str, rows: np.ndarray, positions: list[int]) -> RunFiles:
    # in no order
    files = [blob(folder, f"{key}.1", rows, [2, 4]), blob(folder, f"{key}.0", rows, [0, 2])]
    return RunFiles(
        key=key, sites={"mlp_act": [2]}, positions=positions, hidden_size=0, bytes=1, files=files
    )


def test_the_order_is_of_the_sum_over_places_with_the_ranks_columns_joined(tmp_path: Path) -> None:
    base = np.array([[0, 0, 0, 0], [1, 1, 1, 1], [9, 9, 9, 9]], float)
    source = np.array([[0, 5, 0, 1], [1, 1, 3, 1]], float)
    runs = run(tmp_path, "base", base, [3, 4, 5]), run(tmp_path, "source", source, [7, 8])
    order = order_by_difference(open_store(str(tmp_path)), *runs, [SITE], [(3, 7), (4, 8)], 3)
    assert order == {SITE: [1, 2, 3]}, "5, 2 and 1; what is nowhere compared does not count"


def test_a_site_that_is_in_no_file_is_named(tmp_path: Path) -> None:
    runs = (
        run(tmp_path, "base", np.zeros((1, 4)), [0]),
        run(tmp_path, "source", np.zeros((1, 4)), [0]),
    )
    with pytest.raises(ValueError, match="base has no rows of mlp_act of layer 3"):
        order_by_difference(open_store(str(tmp_path)), *runs, [("mlp_act", 3)], [(0, 0)], 1)
