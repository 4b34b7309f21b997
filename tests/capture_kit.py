"""Captures as a rank finishes them, with rows whose values say which they are."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from midstream.schemas.jobs.receipts import CapturedFile
from midstream.schemas.prompts.selectors import HOOKS
from midstream.schemas.requests.source_runs import RunFile, RunFiles, run_key
from midstream.schemas.requests.specs import RankSpec, StoredCapture
from midstream.storage.capture_usage import CaptureUsage
from midstream.storage.store import ArtifactStore, open_store
from midstream.workers.runner.files.finished_rows import FinishedCapture, Outcome
from midstream.workers.runner.files.layouts import Filesystem, StoreConfig

HIDDEN = 5
Sites = dict[str, list[int]]


def values(hook: str, layer: int, positions: Sequence[int]) -> np.ndarray:
    """`[positions, HIDDEN]` float32, exact in bfloat16 (seven bits and an exponent), different
    everywhere.
    """
    first = 2.0 ** -HOOKS.index(hook)  # type: ignore[arg-type]
    rows = [
        [(layer * 16 + position + 1) * first * 2.0 ** (7 * column) for column in range(HIDDEN)]
        for position in positions
    ]
    return np.array(rows, dtype=np.float32).reshape(len(positions), HIDDEN)


def stored(array: np.ndarray, dtype: str) -> bytes:
    """The float32 array in another dtype, where that is exact."""
    return (
        (array.view(np.uint32) >> 16).astype("<u2").tobytes()
        if dtype == "bfloat16"
        else array.astype(dtype).tobytes()
    )


def finished(
    job: str = "job_x",
    request: int = 0,
    sites: Sites | None = None,
    positions: Sequence[int] = (0, 1, 2),
    *,
    all_sites: Sites | None = None,
    layout: str = "auto",
    tag: str = "tag",
    attempt: int = 1,
    pp: int = 0,
    stages: int = 1,
    dtype: str = "bfloat16",
    consumers: Sequence[str] = ("filesystem",),
    shift: float = 0.0,
    requests: int = 0,
    prompt_tokens: int | None = None,
    **more: Any,
) -> FinishedCapture:
    """One capture.

    `sites`: of this stage; `all_sites`: of all. Rows are `values`, plus `shift`; each comes as two
    buffers.

    `requests`: how many of the job's there are said to be.
    """
    held = sites or {"post_block": [2, 3]}
    capture = StoredCapture(
        sites=all_sites or held,  # type: ignore[arg-type]
        positions="all",
        tag=tag,
        layout=layout,  # type: ignore[arg-type]
        consumers=list(consumers),
    )

    def rows(hook: str, layer: int) -> list[memoryview]:
        array = values(hook, layer, positions) + np.float32(shift)
        half = len(positions) // 2
        return [memoryview(stored(array[:half], dtype)), memoryview(stored(array[half:], dtype))]

    return FinishedCapture(
        spec=RankSpec(
            version="1",
            job=job,
            request=request,
            attempt=attempt,
            prompt_tokens=len(positions) if prompt_tokens is None else prompt_tokens,
            captures=[capture],
            requests={tag: requests} if requests else {},
        ),
        capture=capture,
        sites=held,
        hidden_size=HIDDEN,
        dtype=dtype,
        positions=list(positions),
        worker="w",
        rank=pp,
        pp=pp,
        stages=stages,
        **({"rows": rows, "token_ids": [100 + position for position in positions]} | more),
    )


def filesystem(root: ArtifactStore | Path, owner: str = "w.boot.0", **config: Any) -> Filesystem:
    store = StoreConfig(open_store(root) if isinstance(root, Path) else root, owner, **config)
    return Filesystem(store, CaptureUsage(store.store, store.quota))


def write(
    root: ArtifactStore | Path, *captures: FinishedCapture, **config: Any
) -> list[CapturedFile]:
    """Through the consumer `filesystem`; the files of all, which must have been written."""
    store = filesystem(root, **config)
    outcomes: list[Outcome] = store.consume(captures)
    store.close()
    assert [outcome.error for outcome in outcomes] == [""] * len(captures)
    return [file for outcome in outcomes for file in outcome.files]


def run_of(
    files: Sequence[CapturedFile],
    sites: Sites,
    positions: Sequence[int] = (0, 1, 2),
    *,
    job: str = "job_x",
    tag: str = "tag",
    **other: Any,
) -> RunFiles:
    """What ranks are told of a run whose blobs these are; `other`: what is said otherwise."""
    blobs = [
        RunFile(path=file.path, offset=file.offset, bytes=file.bytes, crc32=file.crc32)
        for file in files
    ]
    told: dict[str, Any] = {
        "key": run_key(job, 0, tag),
        "sites": sites,
        "positions": list(positions),
        "hidden_size": HIDDEN,
    }
    return RunFiles(**(told | {"bytes": sum(file.bytes for file in files), "files": blobs} | other))


def source_run(
    root: ArtifactStore | Path,
    sites: Sites,
    positions: Sequence[int],
    *,
    job: str = "job_s",
    **more: Any,
) -> RunFiles:
    """A run of `values`, in float32 if nothing else is said, whose files are under the capture
    root.
    """
    wrote = write(
        root,
        finished(job, sites=sites, positions=positions, **({"dtype": "float32"} | more)),
        segment_limit=0,
    )
    return run_of(wrote, sites, positions, job=job)
