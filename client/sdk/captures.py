"""Calls on stored captures, and on attention patterns, computed from captured queries, keys and
values.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np

from ...schemas.base.errors import invalid
from ...schemas.base.tensors import from_numpy
from ...schemas.jobs.captures import CapturePage
from ...schemas.jobs.jobs import JobResult
from ...schemas.prompts.selectors import LayerSelector
from ...schemas.requests.specs import PatchSource, PatchSpec
from ..captures.attention import mixed
from ..captures.patterns import Attention, attention_of
from ..captures.reader import CaptureReader
from ..captures.row_matrix import Rows, matrix
from . import wire
from .answers import download
from .calls import call, finish
from .jobs import JobCalls
from .wire import Call, JobLike, ManifestFile


def capture_fields(
    prompt: str | Sequence[int], layers: LayerSelector, fields: dict[str, Any]
) -> dict[str, Any]:
    """Return the fields of a job that captures a prompt's queries and keys as attention uses them,
    after any edits.

    `fields`: the job's other fields, such as `model` and `steering`.
    """
    capture = {"hooks": {"q": layers, "k": layers}, "positions": "all_prompt", "at": "after"}
    return {
        "sampling": {"max_tokens": 1},
        **fields,
        "prompts": [prompt if isinstance(prompt, str) else list(prompt)],
        "capture": capture,
    }


#: Fields of the final job that its helper jobs share, because they affect the values or how the job
#: is handled. Other fields, such as webhooks, apply to the final job alone.
_SHARED = frozenset(
    {"model", "lora", "steering", "patch", "priority", "expires_in", "progress", "timeout"}
)
#: (layer, head) → `[query, key]`.
Patterns = Mapping[tuple[int, int], np.ndarray]


def by_layer(patterns: Patterns, fields: Mapping[str, Any]) -> dict[int, Patterns]:
    """Return the patterns of each layer, lowest layer first.

    Raises MidstreamError for no layers or a negative layer, and for probes that may edit values.
    """
    layers = sorted({layer for layer, _ in patterns})
    if not layers or layers[0] < 0:
        raise invalid(
            "patterns",
            f"are of layers {layers}",
            allowed="heads of one or more layers, counted from 0",
        )
    given = fields.get("probes") or []
    for probe in given if isinstance(given, list | tuple) else [given]:
        if (
            probe.get("action") if isinstance(probe, Mapping) else getattr(probe, "action", None)
        ) == "steer":
            raise invalid(
                "probes",
                "a probe that steers by its scores may edit the values",
                allowed="other actions of probes",
            )
    return {
        layer: {place: pattern for place, pattern in patterns.items() if place[0] == layer}
        for layer in layers
    }


def values_fields(
    prompt: str | Sequence[int], layer: int, patches: list[PatchSpec], fields: dict[str, Any]
) -> dict[str, Any]:
    """Return the fields of a job that captures, at one layer, the rows that `attention_patches`
    needs, with `patches` applied to the layers below.
    """
    capture = {"hooks": {"q": [layer], "v": [layer]}, "positions": "all_prompt", "at": "after"}
    same = {name: value for name, value in fields.items() if name in _SHARED}
    return {
        **patched_fields(prompt, patches, same),
        "sampling": {"max_tokens": 1},
        "capture": capture,
    }


def attention_patches(reader: CaptureReader, patterns: Patterns) -> list[PatchSpec]:
    """Return one patch of `z` per token of the prompt, z ← A′·v: the output that the heads in
    `patterns` have if their attention is A′, the given pattern.

    `patterns`: those of one layer. `reader`: a capture of `q` and `v` of that layer at all
    positions of the prompt. Raises what `mixed` raises.
    """
    ((layer, _), *_), heads = patterns, {head: pattern for (_, head), pattern in patterns.items()}
    kind = reader.attention_kind(layer)
    rows = mixed(reader.array(layer, "v"), heads, kind)
    mask = ",".join(
        f"{head * kind.head_dim}-{(head + 1) * kind.head_dim - 1}" for head in sorted(heads)
    )
    return [
        PatchSpec(
            layers=layer,
            positions=[position],
            hook="z",
            source=PatchSource(vector=from_numpy(row)),
            mask=mask,
        )
        for position, row in zip(reader.positions(), rows, strict=True)
    ]


def patched_fields(
    prompt: str | Sequence[int], patches: list[PatchSpec], fields: dict[str, Any]
) -> dict[str, Any]:
    """Return the job's fields with `patches` appended to its own patches."""
    own = fields.get("patch", [])
    prompts = [prompt if isinstance(prompt, str) else list(prompt)]
    patched = (
        {"patch": [*(own if isinstance(own, list | tuple) else [own]), *patches]} if patches else {}
    )
    return {**fields, "prompts": prompts, **patched}


class CaptureCalls(JobCalls):
    @call
    async def capture(
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
        `tokens()` uses the server's tokenizer: with `Client`, each call queries the server;
        `AsyncClient` queries it here, so that `tokens()` need not be awaited.
        """
        job_id = wire.id_of(job_id)
        reader = await self._open_capture(job_id, folder, tag, partial)
        if self._io.blocks:
            reader.read_tokens = lambda ids: finish(self._words(job_id, ids))
        else:
            known = sorted(
                {token for request in reader.requests() for token in reader.token_ids(request)}
            )
            words = dict(zip(known, await self._words(job_id, known), strict=True))
            reader.read_tokens = lambda ids: [words[token] for token in ids]
        return reader

    @call
    async def matrix(
        self, jobs: Iterable[JobLike], layer: int, hook: str | None = None, rows: Rows = "last"
    ) -> np.ndarray:
        """Return `midstream.matrix` of the captures of several jobs: float32 `[samples, hidden]`
        over all their requests.
        """
        return matrix([await self.capture(job) for job in jobs], layer, hook, rows)

    @call
    async def captures(
        self, *, tag: str | None = None, limit: int | None = None, cursor: str | None = None
    ) -> CapturePage:
        """Return one page of stored captures, newest first; its `next` is the next `cursor`."""
        return await self._ask(
            Call("GET", "/v1/captures", params=wire.given(tag=tag, limit=limit, cursor=cursor)),
            CapturePage,
        )

    @call
    async def delete_capture(self, job_id: JobLike) -> None:
        """Delete a job's capture files.

        Raises `gone` if they were deleted before, `conflict` while the job runs.
        """
        await self._do(Call("DELETE", wire.capture_path(job_id)))

    @call
    async def attention(
        self,
        /,
        prompt: str | Sequence[int],
        *,
        layers: LayerSelector = "all",
        heads: LayerSelector | None = None,
        **fields: Any,
    ) -> Attention:
        """Return the attention patterns `[heads, query, key]` of a prompt in `layers`.

        `prompt`: text or token ids. `heads`: by default all. `fields`: of the job that captures
        queries and keys, such as `model`, `steering` or `lora`; edits at `q` and `k` affect the
        patterns. The job's capture stays on the server, see `Attention.job`. Raises what the job
        and `CaptureReader.attention` raise.
        """
        with await self.capture(
            await self.run(**({"progress": False} | capture_fields(prompt, layers, fields)))
        ) as reader:
            return await self._io.work(attention_of, reader, layers, heads)

    @call
    async def patch_attention(
        self, /, prompt: str | Sequence[int], patterns: Patterns, **fields: Any
    ) -> JobResult:
        """Run a prompt with the attention of some heads replaced by `patterns`: z ← A′·v, with the
        prompt's own values, layer after layer.

        `patterns`: (layer, head) → A′ `[query, key]` over the tokens of the prompt, zero where the
        key is later than the query; rows need not sum to 1. Generated tokens attend as usual.
        `fields`: of the job, such as `model`, `capture` and `sampling`; probes may not steer. Runs
        one job per layer, which captures that layer's values with the layers below patched, and
        then the job itself. Raises what `attention_patches` and the jobs raise.
        """
        patches: list[PatchSpec] = []
        for layer, layer_patterns in by_layer(patterns, fields).items():
            with await self.capture(
                await self.run(
                    **({"progress": False} | values_fields(prompt, layer, patches, fields))
                )
            ) as reader:
                patches = [*patches, *attention_patches(reader, layer_patterns)]
        return await self.run(**patched_fields(prompt, patches, fields))

    async def _words(self, job_id: JobLike, ids: list[int]) -> list[str]:
        return (await self.detokenize((await self.job(job_id)).model, ids)).token_strs

    async def _open_capture(
        self, job_id: str, folder: Path | str | None, tag: str | None, partial: bool
    ) -> CaptureReader:
        manifest = await self._ask(Call("GET", wire.capture_path(job_id)), wire.Manifest)
        download.check(manifest, job_id, partial)
        result = download.in_place(manifest, job_id) if folder is None else None
        if result:
            return download.reader(manifest, job_id, result, tag, partial)
        target = download.target_folder(folder)
        paths: list[Path] = []
        for file in manifest.files:
            path = await self._io.work(download.from_link, target, job_id, file)
            paths.append(path or await self._download(target, job_id, file))
        return download.reader(manifest, job_id, paths, tag, partial)

    async def _download(self, target: Path, job_id: str, file: ManifestFile) -> Path:
        async with self._io.stream(
            method="GET", url=wire.capture_path(job_id, "files", file.name)
        ) as streamed:
            if streamed.response.status_code >= 400:
                wire.raise_problem(await streamed.read())
            with download.Saved(target, job_id, file) as saved:
                async with aclosing(streamed.chunks()) as chunks:
                    async for chunk in chunks:
                        await self._io.work(saved.write, chunk)
            return saved.path
