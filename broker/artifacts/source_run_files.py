"""Finds the files of a source run's rows, by its job's receipts or in the artifact store alone."""

from collections.abc import Sequence
from typing import NamedTuple, cast

from ...schemas.base.dtypes import ITEM_BYTES
from ...schemas.base.errors import MidstreamError
from ...schemas.base.records import fields_of
from ...schemas.jobs.captures import Manifest
from ...schemas.jobs.receipts import CapturedFile
from ...schemas.prompts.selectors import FORWARD, Hook
from ...schemas.prompts.sites import hook_layers
from ...schemas.requests.source_runs import RunFile, RunFiles, RunPrompt
from ...storage.store import ArtifactStore
from .headers import find_entries, place_in, read_headers

LayersOfHooks = dict[Hook, list[int]]


class RunBlob(NamedTuple):
    """A durable blob of a run: its location and its manifest."""

    file: RunFile
    manifest: Manifest


def reported(
    store: ArtifactStore, job: str, files: Sequence[tuple[int, CapturedFile]]
) -> list[RunBlob]:
    """Return the blobs that receipts name. `files`: (prompt, file) of each.

    Raises MidstreamError as `read_headers` does.
    """
    headers = read_headers(
        store, job, [place_in(store, job, request, file) for request, file in files]
    )
    return [
        RunBlob(
            RunFile(**fields_of(file, RunFile)),
            header.manifest,
        )
        for (_, file), header in zip(files, headers, strict=True)
    ]


def on_disk(store: ArtifactStore, job: str, tag: str) -> dict[int, list[RunBlob]]:
    """Return prompt → the blobs of its last complete attempt, or of its last if none is complete.

    Raises MidstreamError as `find_entries` does.
    """
    attempts: dict[int, dict[int, list[RunBlob]]] = {}
    for path, entry in find_entries(store, job, tag):
        if (entry.manifest.job, entry.manifest.tag) == (job, tag):
            blob = RunBlob(
                RunFile(path=path, **fields_of(entry, RunFile)),
                entry.manifest,
            )
            attempts.setdefault(entry.manifest.request, {}).setdefault(
                entry.manifest.attempt, []
            ).append(blob)
    return {request: _last_complete(attempts[request]) for request in sorted(attempts)}


def _last_complete(attempts: dict[int, list[RunBlob]]) -> list[RunBlob]:
    newest_first = [attempts[attempt] for attempt in sorted(attempts, reverse=True)]
    return next((blobs for blobs in newest_first if not shortfall(blobs)), newest_first[0])


def shortfall(blobs: Sequence[RunBlob]) -> str:
    """Return why these blobs lack rows of a prompt; empty if they have all."""
    if not blobs:
        return "no rows of this prompt were captured"
    first = blobs[0].manifest
    for _, manifest in blobs:
        if manifest.dropped:
            return f"positions were dropped under overload (count: {len(manifest.dropped)})"
        if manifest.heads:
            return "it holds single heads, and a source run has whole rows"
        if (manifest.positions, manifest.token_ids) != (first.positions, first.token_ids):
            return "its files disagree on positions or tokens"
    held = {site for _, manifest in blobs for site in hook_layers(manifest.sites)}
    lacking = sorted(set(hook_layers(first.all_sites)) - held)
    return f"{lacking[0][0]} of layer {lacking[0][1]} is in no file" if lacking else ""


def run_files(key: str, blobs: Sequence[RunBlob]) -> RunFiles:
    """Return the files that ranks load. `blobs` must be without a `shortfall`."""
    of_rows = fields_of(run_prompt(blobs), RunFiles)
    return RunFiles(key=key, files=[blob.file for blob in blobs], **of_rows)


def run_prompt(blobs: Sequence[RunBlob]) -> RunPrompt:
    """Return the summary for users. `blobs` must be without a `shortfall`."""
    first = blobs[0].manifest
    sites = _sites(blobs)
    elements = sum(
        len(first.positions) * sum(map(len, manifest.sites.values())) * _columns(manifest)
        for _, manifest in blobs
    )
    return RunPrompt(
        request=first.request,
        tokens=first.prompt_tokens,
        sites=sites,
        positions=first.positions,
        token_ids=first.token_ids,
        dtype=first.dtype,
        hidden_size=next(
            (manifest.hidden_size for _, manifest in blobs if manifest.row is None), 0
        ),
        bytes=elements * ITEM_BYTES[first.dtype],
    )


def _columns(manifest: Manifest) -> int:
    """Return the number of elements of a row in its blob."""
    if manifest.columns:
        return manifest.columns[1] - manifest.columns[0]
    return manifest.hidden_size if manifest.row is None else manifest.row.size


def _sites(blobs: Sequence[RunBlob]) -> LayersOfHooks:
    """Return the sites of all stages, in the order of a forward pass."""
    sites: dict[str, set[int]] = {}
    for _, manifest in blobs:
        for hook, layers in manifest.sites.items():
            sites.setdefault(hook, set()).update(layers)
    return {
        cast(Hook, hook): sorted(sites[hook])
        for hook in sorted(sites, key=lambda hook: FORWARD.index(cast(Hook, hook)))
    }


def unusable(key: str, why: str) -> MidstreamError:
    return MidstreamError("intervention_failed", f"source run {key}: {why}")
