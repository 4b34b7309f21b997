"""Calls on stored captures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from ...schemas.base.errors import invalid
from ...schemas.jobs.captures import CapturePage
from ...schemas.jobs.jobs import JobRequest, Sampling
from ..captures.blobs import BlobLocation
from ..captures.reader import CaptureReader
from ..captures.row_matrix import RowChoice, matrix
from ..values import known_keywords
from . import wire
from .answers import download
from .calls import Awaits, Calls, M, call, finish
from .fields import HookInput, Numbers, Positions, RowsFields
from .jobs import Jobs
from .server import ServerCalls
from .wire import HttpCall, JobLike, ManifestEntry

#: Bytes per chunk of a download.
CHUNK = 1 << 20


def _prompts(given: Any) -> dict[str, Any]:
    """Return prompts or conversations as fields of a job: one of them, or a list."""
    items = [given] if isinstance(given, str) else list(given)
    first = items[0] if items else ""
    if isinstance(first, Mapping) or hasattr(first, "__index__"):
        items = [items]
    said = isinstance(first, Mapping) or (
        isinstance(first, Sequence) and bool(first) and isinstance(first[0], Mapping)
    )
    return {"messages" if said else "prompts": items}


class Captures(Calls[M]):
    """Stored captures; `matrix` joins rows of several jobs
    (docs/client.md#one-matrix-from-many-requests).
    """

    @call
    async def open(
        self,
        job_id: JobLike,
        folder: Path | str | None = None,
        tag: str | None = None,
        *,
        partial: bool = False,
    ) -> CaptureReader:
        """Return a reader of a job's captured rows: read in place on the server's machine,
        otherwise downloaded and checked. The job is given by id, result or answer.

        `folder`: where to keep a download; by default a temporary folder, removed when the program
        ends. `tag`: by default that of the job's own capture; the operator's global capture has
        another tag. `partial`: read the existing files of a capture that is `pending`, `error` or
        `timed_out`; without it, they raise `conflict`, `capture_failed` or `receipts_timed_out`.
        The reader's `status` and `detail` are the server's; `gaps()` lists what is missing.
        `tokens` uses the server's tokenizer: with `Client`, each call queries the server;
        `AsyncClient` queries it here, so that `tokens` need not be awaited.
        """
        job_id = wire.id_of(job_id)
        reader = await self._open(job_id, folder, tag, partial)
        if self._io.blocks:
            reader.read_tokens = lambda ids: list(finish(self._words(job_id, ids)))
        else:
            known = sorted(
                {token for request in reader.requests() for token in reader.token_ids(request)}
            )
            words = dict(zip(known, await self._words(job_id, known), strict=True))
            reader.read_tokens = lambda ids: [words[token] for token in ids]
        return reader

    @call
    async def rows(
        self,
        /,
        prompts: Any,
        *,
        layers: Numbers | None = None,
        hook: HookInput | None = None,
        hooks: Any = None,
        positions: Positions = "all_prompt",
        at: str | None = None,
        **fields: Unpack[RowsFields],
    ) -> CaptureReader:
        """Run prompts only as far as the rows asked for need, and return a reader of them: no token
        is generated, and no layer computed above the highest one.

        `prompts`: a text, token ids or a conversation; or a list of texts, of token ids or of
        conversations. `layers`: by default all; `hook`: by default post_block; `hooks`: several,
        all at `layers`, or each with its own. `at`: before (default) or after edits at the same
        site. `fields`: other fields of the job, such as `model`, `steering` or `lora`. The rows
        stay on the server until `captures.delete(reader.job)`. Raises what the job and `open`
        raise.
        """
        capture = wire.given(layers=layers, hook=hook, hooks=hooks, positions=positions, at=at)
        own = {"progress": False, **fields}
        known_keywords(own.keys() - RowsFields.__annotations__.keys(), JobRequest, capture)
        for name in ("capture", "sampling", *Sampling.__struct_fields__):
            if name in own:
                raise invalid(name, "is not valid for rows", hint="use run(max_tokens=0, …)")
        job: Any = own | _prompts(prompts) | {"capture": capture, "sampling": {"max_tokens": 0}}
        return await self.open(await Jobs[Awaits](self._io).run(**job))

    @call
    async def matrix(
        self, jobs: Iterable[JobLike], layer: int, hook: str | None = None, rows: RowChoice = "last"
    ) -> np.ndarray:
        """Return `midstream.matrix` of the captures of several jobs: float32 `[samples, hidden]`
        over all their requests.
        """
        return matrix([await self.open(job) for job in jobs], layer, hook, rows)

    @call
    async def list(
        self, *, tag: str | None = None, limit: int | None = None, cursor: str | None = None
    ) -> CapturePage:
        """Return one page of stored captures, newest first; its `next` is the next `cursor`."""
        return await self._get("/v1/captures", CapturePage, tag=tag, limit=limit, cursor=cursor)

    @call
    async def delete(self, job_id: JobLike) -> None:
        """Delete a job's capture files.

        Raises `gone` if they were deleted before, `conflict` while the job runs.
        """
        await self._do(HttpCall("DELETE", wire.capture_path(job_id)))

    async def _words(self, job_id: JobLike, ids: Sequence[int]) -> Sequence[str]:
        model = (await Jobs[Awaits](self._io).get(job_id)).model
        return (await ServerCalls[Awaits](self._io).detokenize(model, ids)).token_strs

    async def _open(
        self, job_id: str, folder: Path | str | None, tag: str | None, partial: bool
    ) -> CaptureReader:
        manifest = await self._get(wire.capture_path(job_id), wire.ReadManifest)
        download.check(manifest, job_id, partial)
        files: list[Path | BlobLocation] = []
        if folder is None:
            files += download.in_place(manifest, job_id)
        if not files:
            target = download.target_folder(folder)
            for file in manifest.files:
                path = await self._io.work(download.from_link, target, job_id, file)
                files.append(path or await self._download(target, job_id, file))
        status = {"status": manifest.status, "detail": manifest.detail}
        return CaptureReader.of_job(files, job_id, tag=tag, partial=partial, **status).under(
            manifest.hook_names
        )

    async def _download(self, target: Path, job_id: str, file: ManifestEntry) -> Path:
        async with self._io.stream(
            method="GET", url=wire.capture_path(job_id, "files", file.name)
        ) as response:
            wire.raise_problem(response)
            with download.Saved(target, job_id, file) as saved:
                async with aclosing(self._io.chunks(response, CHUNK)) as chunks:
                    async for chunk in chunks:
                        await self._io.work(saved.write, chunk)
            return saved.path
