"""Files of a source run's rows, as two ranks write them."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from midstream.schemas.jobs.captures import FORMAT, Manifest
from midstream.schemas.model.banks import RowShape
from midstream.schemas.requests.source_runs import RunFile, RunFiles
from midstream.storage.formats.capture_blobs import encode_header


def _empty(kind: Any) -> Any:
    """An empty value of a field's type."""
    if str(kind).startswith("dict"):
        return {}
    if str(kind).startswith("list"):
        return []
    return "" if kind is str else 0


def blob(
    folder: Path, name: str, rows: np.ndarray, columns: list[int], site: tuple[str, int]
) -> RunFile:
    """One rank's columns of the rows."""
    fields = {field.name: field for field in msgspec.structs.fields(Manifest)}
    manifest = msgspec.convert(
        {name: _empty(field.type) for name, field in fields.items() if field.required},
        Manifest,
    )
    manifest.format = FORMAT
    manifest.row = RowShape(1, rows.shape[1])
    manifest.columns = columns
    part = rows[:, columns[0] : columns[1]].astype("<f4")
    raw = (
        encode_header([(f"{site[0]}.{site[1]}", "F32", list(part.shape), part.nbytes)], manifest)
        + part.tobytes()
    )
    (folder / name).write_bytes(raw)
    return RunFile(path=name, offset=0, bytes=len(raw), crc32=0)


def run(
    folder: Path,
    key: str,
    rows: np.ndarray,
    positions: list[int],
    site: tuple[str, int],
) -> RunFiles:
    """A run with the rows of two ranks, in no order."""
    halves = [[2, rows.shape[1]], [0, 2]]
    files = [blob(folder, f"{key}.{half[0]}", rows, half, site) for half in halves]
    return RunFiles(key=key, sites={}, positions=positions, hidden_size=0, bytes=1, files=files)
