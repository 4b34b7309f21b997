"""Files of a source run's rows, as two ranks write them."""

import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from midstream.schemas.jobs.captures import FORMAT, Manifest
from midstream.schemas.model.banks import RowShape
from midstream.schemas.requests.source_runs import RunFile, RunFiles, run_key
from midstream.storage.formats.capture_blobs import encode_header

TAG = "base"


def _empty(kind: Any) -> Any:
    """An empty value of a field's type."""
    if str(kind).startswith("dict"):
        return {}
    if str(kind).startswith("list"):
        return []
    return "" if kind is str else 0


def blob(
    folder: Path,
    name: str,
    rows: np.ndarray,
    positions: list[int],
    columns: list[int],
    site: tuple[str, int],
) -> RunFile:
    """One rank's columns of the rows of job `name`."""
    fields = {field.name: field for field in msgspec.structs.fields(Manifest)}
    manifest = msgspec.convert(
        {name: _empty(field.type) for name, field in fields.items() if field.required},
        Manifest,
    )
    manifest.format = FORMAT
    manifest.job = name
    manifest.tag = TAG
    manifest.positions = positions
    manifest.row = RowShape(1, rows.shape[1])
    manifest.columns = columns
    part = rows[:, columns[0] : columns[1]].astype("<f4")
    raw = (
        encode_header([(f"{site[0]}.{site[1]}", "F32", list(part.shape), part.nbytes)], manifest)
        + part.tobytes()
    )
    path = f"{name}.{columns[0]}"
    (folder / path).write_bytes(raw)
    return RunFile(path=path, offset=0, bytes=len(raw), crc32=zlib.crc32(raw))


def run(
    folder: Path,
    name: str,
    rows: np.ndarray,
    positions: list[int],
    site: tuple[str, int],
) -> RunFiles:
    """A run of job `name` with the rows of two ranks, in no order."""
    halves = [[2, rows.shape[1]], [0, 2]]
    files = [blob(folder, name, rows, positions, half, site) for half in halves]
    return RunFiles(
        key=run_key(name, 0, TAG),
        sites={site[0]: [site[1]]},
        positions=positions,
        hidden_size=0,
        bytes=1,
        files=files,
    )
