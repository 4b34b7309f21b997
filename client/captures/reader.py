"""Reads captured activations as numpy arrays, from every file layout, without torch."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from ...schemas.base.errors import MidstreamError, invalid
from ...schemas.base.records import Plotted
from ...schemas.jobs.captures import Manifest, index_of
from ...schemas.model.attention import AttentionKind
from ...schemas.model.banks import BANK, OF_HEADS
from ...schemas.model.routing import routed
from ...schemas.prompts.images import ImageSpan
from ...schemas.prompts.selectors import (
    ALIASES,
    FORWARD,
    LENS_NAMES,
    ByHook,
    LayerSelector,
    as_ranges,
    full_name,
)
from ...schemas.prompts.sites import hook_layers
from ...storage.store import ArtifactStore, open_store
from . import tables
from .attention import attention_at, pattern, routing_at, usable
from .blobs import BlobLocation, BlobReader, at, expand, find, open_blobs

if TYPE_CHECKING:
    import pandas
    import xarray

CaptureSource = Path | str | ArtifactStore | Iterable[Path | str | BlobLocation]
#: How `CaptureReader.arrays` names sites.
HookNaming = Literal["midstream", "transformer_lens"]
DEFAULT_HOOK = "post_block"
_PARTIAL = "partial=True reads the available rows"
#: The most ranges of numbers that a message lists.
_SHOWN_RANGES = 16


@dataclass(frozen=True)
class VerifyFinding:
    """A finding of `CaptureReader.verify`: about one blob, or about missing requests or rows."""

    path: Path  # of the blob; the job's id if whole requests are missing
    bytes: int = 0
    crc32: int = 0  # recomputed
    ok: bool = False
    detail: str = ""  # what is wrong, if anything
    request: int = 0
    offset: int = 0  # of the blob in the file


class _Request:
    """One attempt at one request: its blobs of all stages."""

    def __init__(self, blobs: Sequence[BlobReader]):
        self.blobs = sorted(
            blobs, key=lambda blob: (blob.header.manifest.pp, blob.place.key, blob.place.offset)
        )
        #: Site → its blobs: a single one, or one per rank, by column, if each rank stored some
        #: columns of the rows.
        self.sites: dict[tuple[str, int], list[BlobReader]] = {}
        for blob in sorted(self.blobs, key=lambda blob: blob.header.manifest.columns):
            for tensor in blob.header.tensors.values():
                if tensor.site is not None:
                    of_site = self.sites.setdefault(tensor.site, [])
                    columns = blob.header.manifest.columns
                    if of_site and of_site[-1].header.manifest.columns == columns:
                        of_site.pop()  # the same rows, written twice
                    of_site.append(blob)

    @property
    def manifest(self) -> Manifest:
        return self.blobs[0].header.manifest

    @property
    def missing(self) -> list[str]:
        """Tensors that belong to the capture and are in no blob."""
        return [
            f"{hook}.{layer}"
            for hook, layer in hook_layers(self.manifest.all_sites)
            if not _all_columns(self.sites.get((hook, layer), []))
        ]

    def incomplete(self) -> str:
        """Return an error message that lists the missing tensors; empty if none is missing."""
        missing = self.missing
        if not missing:
            return ""
        names = ", ".join(missing[:4]) + (", …" if len(missing) > 4 else "")
        stages = ", ".join(
            str(pp) for pp in sorted({blob.header.manifest.pp for blob in self.blobs})
        )
        return (
            f"request {self.manifest.request} is incomplete: missing tensors "
            f"({len(missing)}): {names}; "
            f"stages present: {stages}, of {self.manifest.stages} in total"
        )

    @property
    def dropped(self) -> list[int]:
        """The positions that at least one stage dropped under overload."""
        return sorted(
            {position for blob in self.blobs for position in blob.header.manifest.dropped}
        )

    @cached_property
    def positions(self) -> dict[int, int]:
        """Position → token id of the positions that every stage holds, ascending. (Under overload,
        stages may drop different positions.)
        """
        first, *rest = self.blobs
        requested = _requested_positions(first)
        shared = _tokens(first)
        for other in rest:
            tokens = _tokens(other)
            if _requested_positions(other) != requested or any(
                tokens[position] != shared[position] for position in tokens.keys() & shared.keys()
            ):
                raise MidstreamError(
                    "ranks_disagree",
                    (
                        f"{first.place.path.name} and {other.place.path.name} "
                        "hold rows of different "
                        "positions or tokens"
                    ),
                )
            if len(tokens) != len(shared) or tokens.keys() != shared.keys():
                shared = {
                    position: token for position, token in shared.items() if position in tokens
                }
        return shared

    def rows(self, blob: BlobReader) -> list[int] | None:
        """Return which rows of the blob's tensors belong to `positions`; None: all."""
        stored = blob.header.manifest.positions
        return (
            None
            if len(stored) == len(self.positions)
            else [row for row, position in enumerate(stored) if position in self.positions]
        )


def _all_columns(blobs: Sequence[BlobReader]) -> bool:
    """Return whether the blobs of one site, in the order of their columns, hold complete rows."""
    end = 0
    for manifest in (blob.header.manifest for blob in blobs):
        if manifest.row is None or not manifest.columns:
            return True
        if manifest.columns[0] != end:
            return False
        end = manifest.columns[1]
        if end == (
            len(manifest.heads) * manifest.row.width if manifest.heads else manifest.row.size
        ):
            return True
    return False


def _requested_positions(blob: BlobReader) -> list[int]:
    manifest = blob.header.manifest
    return (
        sorted([*manifest.positions, *manifest.dropped]) if manifest.dropped else manifest.positions
    )


def _tokens(blob: BlobReader) -> dict[int, int]:
    return dict(zip(blob.raw("positions").tolist(), blob.raw("token_ids").tolist(), strict=True))


class CaptureReader(Plotted):
    """The captured rows of one job under one tag, merged over files and pipeline stages.

    `source`: the job's folder `<capture root>/<tag>/<job>`; or, if `job` is given, the tag's
    folder, the capture root or its store; or a list of files, which need not be all files of the
    job. If a request was attempted several times, its last complete attempt is read. All files are
    opened immediately and stay readable, even if they are deleted, until `close` or until the
    reader is garbage-collected.

    Raises MidstreamError: `not_found` if the source has no captured rows, `gone` if they were
    deleted, `capture_damaged` for damaged files, and `invalid_request` if the source holds several
    jobs or tags and none is named. Without `partial`, listing the requests raises `capture_failed`
    if some are missing, and so does reading a request that lacks a stage or a tensor.
    """

    #: The status of the job's capture (`ok`, `partial`, …) and its reason, from the API; empty for
    #: a reader that does not use the API.
    status: str = ""
    detail: str = ""
    #: Hook point → the name that the request gave it, under which the reader shows it.
    hook_names: Mapping[Any, str] = {}
    #: Returns one text for each token id. Set by `Client.capture`, which asks the server.
    read_tokens: Callable[[list[int]], list[str]] | None = None

    def __init__(
        self,
        source: CaptureSource,
        job: str | None = None,
        *,
        tag: str | None = None,
        partial: bool = False,
    ):
        if isinstance(source, str):
            source = open_store(source) if "://" in source else Path(source)
        if listed := not isinstance(source, Path | ArtifactStore):
            places = expand(map(at, source), job)
        else:
            places = find(source, job, tag)
        what = f"of job {job} " if job else ""
        self._open(
            open_blobs(places),
            job=job,
            tag=tag,
            partial=partial,
            first_tag=listed,  # a list of files keeps the user's order; files in a folder have none
            whole=not listed and not (isinstance(source, Path) and source.is_file()),
            none=f"there are no capture files {what}in {source}",
        )

    @classmethod
    def from_bytes(
        cls, blobs: bytes | Iterable[bytes], *, tag: str | None = None, partial: bool = False
    ) -> "CaptureReader":
        """Return a reader of blobs in memory, all of one job: rows that the consumer `memory`
        returned, or the contents of files.
        """
        reader = cls.__new__(cls)
        opened = [
            BlobReader(BlobLocation(None, f"<bytes {number}>"), memoryview(raw))
            for number, raw in enumerate([blobs] if isinstance(blobs, bytes) else list(blobs))
        ]
        reader._open(opened, tag=tag, partial=partial, none="no blobs given")
        return reader

    @classmethod
    def of_job(
        cls,
        files: Iterable[Path | BlobLocation],
        job: str,
        *,
        status: str,
        detail: str = "",
        tag: str | None = None,
        partial: bool = False,
    ) -> "CaptureReader":
        """Return a reader of `files`: all those that the API lists for a job. `status`, `detail`:
        of the job's capture.
        """
        reader = cls.__new__(cls)
        blobs = open_blobs(map(at, files))
        for blob in blobs:
            if blob.header.manifest.job != job:
                raise MidstreamError(
                    "capture_failed", f"{blob.place.path.name} does not hold rows of job {job}"
                )
        under = f" under the tag {tag!r}" if tag else ""
        none = f"job {job} has no capture files{under}"
        reader._open(blobs, job=job, tag=tag, partial=partial, whole=True, none=none)
        reader.status = status
        reader.detail = detail
        return reader

    def _open(
        self,
        blobs: list[BlobReader],
        *,
        job: str | None = None,
        tag: str | None,
        partial: bool,
        first_tag: bool = True,
        whole: bool = False,
        none: str,
    ) -> None:
        """Group the blobs by request. `first_tag`: without `tag`, read the first blob's tag.
        `whole`: the blobs should be all those of the job. Raises MidstreamError with the text
        `none` if there is none.
        """
        self._partial = partial
        if job is not None:
            blobs = [blob for blob in blobs if blob.header.manifest.job == job]
        jobs = sorted({blob.header.manifest.job for blob in blobs})
        if len(jobs) > 1:
            raise invalid(
                "job", "captures of several jobs found: pass job", allowed=", ".join(jobs)
            )
        self.job = jobs[0] if jobs else ""
        #: The tags in the source; this reader reads one of them.
        self.tags = list(dict.fromkeys(blob.header.manifest.tag for blob in blobs))
        if tag is None and len(self.tags) > 1 and not first_tag:
            raise invalid(
                "tag",
                f"job {self.job} has captures under several tags: pass tag",
                allowed=", ".join(self.tags),
            )
        self.tag = tag if tag is not None else next(iter(self.tags), "")
        attempts: dict[int, dict[int, list[BlobReader]]] = {}
        for blob in blobs:
            manifest = blob.header.manifest
            if manifest.tag == self.tag:
                attempts.setdefault(manifest.request, {}).setdefault(manifest.attempt, []).append(
                    blob
                )
        if not attempts:
            raise MidstreamError("not_found", none)
        self._requests = {request: _last_whole(attempts[request]) for request in sorted(attempts)}
        #: Number of requests that should have rows; 0: unknown.
        self._expected = 0
        if whole:
            self._expected = max(request.manifest.requests for request in self._requests.values())

    def __repr__(self) -> str:
        count = f"{len(self._requests)}" + (
            f" of {self._expected}" if self._missing_requests() else ""
        )
        status = f", status={self.status!r}" if self.status not in ("", "ok") else ""
        return (
            f"CaptureReader(job={self.job!r}, tag={self.tag!r}, requests={count}, "
            f"files={len(self.files)}{status})"
        )

    def __enter__(self) -> "CaptureReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the files; the reader is empty afterwards. Arrays from `raw` stay valid."""
        self._requests.clear()
        self._expected = 0

    def under(self, names: Any) -> "CaptureReader":
        """Show hook points under these names; return the reader."""
        self.hook_names = names or {}
        return self

    @property
    def files(self) -> list[Path]:
        """The files of the reader, ordered by request and stage; each segment once."""
        return list(
            dict.fromkeys(
                blob.place.path for request in self._requests.values() for blob in request.blobs
            )
        )

    def requests(self) -> list[int]:
        """Return the indices of the job's prompts that have rows."""
        if not self._partial and (why := self._missing_requests()):
            raise MidstreamError("capture_failed", why, hint=_PARTIAL)
        return list(self._requests)

    def hooks(self, request: int = 0) -> list[str]:
        """Return the captured hook points, in the order of the forward pass."""
        captured = {hook for hook, _ in self._of(request).sites}
        return [
            self.hook_names.get(hook, hook)
            for hook in [*FORWARD, *sorted(captured - set(FORWARD))]
            if hook in captured
        ]

    def layers(self, request: int = 0, hook: str | None = None) -> list[int]:
        """Return the layers captured at `hook`, over all stages, ascending."""
        chosen = self._hook(hook, request)
        return sorted(layer for name, layer in self._of(request).sites if name == chosen)

    def site(self, layer: int | str, hook: str | None = None, request: int = 0) -> tuple[str, int]:
        """Return the hook point and the layer of `array(layer, hook, request)`."""
        _, _, (name, number) = self._tensor(layer, hook, request)
        return self.hook_names.get(name, name), number

    def positions(self, request: int = 0) -> list[int]:
        """Return the absolute token positions of the rows: row i of every array is at position
        `positions[i]`.
        """
        return list(self._of(request).positions)

    def token_ids(self, request: int = 0) -> list[int]:
        """Return the token id at each of `positions`."""
        return list(self._of(request).positions.values())

    def images(self, request: int = 0) -> list[ImageSpan]:
        """Return where each image of the prompt is: positions `[start, stop)`, in order."""
        return self._of(request).manifest.images

    @property
    def tokens(self) -> list[str]:
        """The text of the token at each of `positions()`, with its leading space: of the first
        prompt, as all that takes a `request`; `tokens_of(request)` has those of the others.

        Raises MidstreamError: `not_found` for a reader that was opened from files alone (use
        `Client.capture`), and what the request to the server raises.
        """
        if self.read_tokens is None:
            raise MidstreamError(
                "not_found",
                "files hold token ids and no tokenizer",
                field="tokens",
                hint="open the capture with Client.capture(job), or pass token_ids() to "
                "Client.detokenize",
            )
        return self.read_tokens(self.token_ids())

    def tokens_of(self, request: int = 0) -> list[str]:
        """Return the text of the token at each of `positions(request)`; for a reader opened from
        files alone, its id in digits.
        """
        ids = self.token_ids(request)
        return [str(token) for token in ids] if self.read_tokens is None else self.read_tokens(ids)

    def dropped(self, request: int = 0) -> list[int]:
        """Return the requested positions that at least one stage dropped under overload."""
        return self._of(request).dropped

    def array(self, layer: int | str, hook: str | None = None, request: int = 0) -> np.ndarray:
        """Return the rows of one site, `[positions, hidden]` float32, a copy.

        `hook`: may be a TransformerLens name; by default `post_block`, or the only captured hook.
        `layer`: a negative number counts from the model's last layer, -1; or a full name of
        TransformerLens, such as `blocks.3.hook_resid_post`. Raises MidstreamError that lists the
        captured layers.
        """
        return self._joined(layer, hook, request, BlobReader.array)

    def arrays(self, request: int = 0, *, names: HookNaming = "midstream") -> dict[str, np.ndarray]:
        """Return the rows of all captured sites, each as `array` does, by name: `post_block.3`, or
        with `names="transformer_lens"`, `blocks.3.hook_resid_post`.

        Hook points that TransformerLens does not have keep Midstream's name.
        """
        if names not in get_args(HookNaming):
            raise invalid("names", f"{names!r} is unknown", allowed=", ".join(get_args(HookNaming)))
        known: dict[Any, str] = ByHook(LENS_NAMES if names == "transformer_lens" else {})
        return {
            f"blocks.{layer}.{known[hook]}" if hook in known else f"{hook}.{layer}": self.array(
                layer, hook, request
            )
            for hook in self.hooks(request)
            for layer in self.layers(request, hook)
        }

    def raw(self, layer: int | str, hook: str | None = None, request: int = 0) -> np.ndarray:
        """Return `[positions, hidden]` as stored in the file: read-only and not copied; bfloat16 as
        uint16 bit patterns.

        (The array is a copy only if each rank stored some columns of the rows, or if another stage
        dropped some of these rows.)
        """
        return self._joined(layer, hook, request, BlobReader.raw)

    def _joined(
        self,
        layer: int | str,
        hook: str | None,
        request: int,
        read: Callable[[BlobReader, str], np.ndarray],
    ) -> np.ndarray:
        """Return the rows of one site, with the columns of all ranks side by side."""
        merged, blobs, (name, number) = self._tensor(layer, hook, request)
        parts = []
        for blob in blobs:
            array = read(blob, f"{name}.{number}")
            rows = merged.rows(blob)
            parts.append(array if rows is None else array[rows])
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def stack(
        self, layers: Sequence[int] | None = None, hook: str | None = None, request: int = 0
    ) -> np.ndarray:
        """Return `[layers, positions, hidden]` float32, by default of all captured layers."""
        return np.stack(
            [
                self.array(layer, hook, request)
                for layer in (self.layers(request, hook) if layers is None else layers)
            ]
        )

    def to_pandas(
        self, hook: str | None = None, requests: Sequence[int] | None = None
    ) -> "pandas.DataFrame":
        """Return one line per captured row: index request, layer and position; columns token,
        token_id, and 0 to hidden − 1 (float32).

        `hook`: by default `post_block`, or the only captured hook. `requests`: by default all.
        Raises MidstreamError without pandas.
        """
        return tables.data_frame(
            self, hook, list(self.requests() if requests is None else requests)
        )

    def to_xarray(self, hook: str | None = None, request: int = 0) -> "xarray.DataArray":
        """Return float32 `[layer, position, dim]`, with token and token_id of each position.

        Raises MidstreamError without xarray.
        """
        return tables.data_array(self, hook, request)

    def attention(
        self,
        layer: int,
        head: LayerSelector | None = None,
        request: int = 0,
        *,
        queries: Sequence[int] | None = None,
    ) -> np.ndarray:
        """Return attention patterns, float32 `[heads, query, key]`, computed from the captured `q`
        and `k` of `layer`.

        Both axes are `positions(request)`; keys that a query does not see are 0, and a row sums to
        1, or to less if the model has attention sinks. `head`: a number, a list or `"0-3"`; by
        default all of the layer. `queries`: the absolute positions of the queries to return, by
        default all; a negative position counts from the prompt's end. The values are those of
        transformers' eager attention, see `docs/read.md`.

        Raises MidstreamError: `not_found` if `q`, `k` or a key that a query sees was not captured,
        or if patterns cannot be computed for the layer's kind of attention; `invalid_request` for
        an unknown head, or if the result would be too large.
        """
        kind = self.attention_kind(layer, request)
        manifest = self.manifest(request)
        if kind.text_only and manifest.images:
            raise MidstreamError(
                "not_found",
                f"in layer {layer}, tokens of an image attend to each other in both directions: a "
                "prompt with images has no causal pattern",
                field="request",
            )
        rows = (
            None
            if queries is None
            else [place if place >= 0 else manifest.prompt_tokens + place for place in queries]
        )
        return pattern(
            self.array(layer, "q", request),
            self.array(layer, "k", request),
            usable(kind, layer),
            self.positions(request),
            heads=head,
            rows=rows,
        )

    def attention_kind(self, layer: int, request: int = 0) -> AttentionKind:
        """Return how a layer turns queries and keys into patterns.

        Raises MidstreamError if `q` was not captured, or if the capture does not record the kind of
        attention.
        """
        _, blobs, (_, number) = self._tensor(layer, "q", request)
        return attention_at(blobs[0].header.manifest.attention, number)

    def heads(self, layer: int | str, hook: str | None = None, request: int = 0) -> np.ndarray:
        """Return the captured heads of a hook that has heads: `[positions, heads, head size]`
        float32.
        """
        _, blobs, (name, _) = self._tensor(layer, hook, request)
        shape = blobs[0].header.manifest.row
        if shape is None or (
            shape.heads == 1 and BANK[name] not in OF_HEADS  # type: ignore[index]
        ):
            raise MidstreamError(
                "not_found",
                f"{name} has no heads, or the file does not record them",
                field="hook",
            )
        rows = self.array(layer, hook, request)
        return rows.reshape(len(rows), -1, shape.width)

    def experts(self, layer: int, request: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return the experts that each token was routed to, largest weight first, and the weights:
        int64 and float32 `[positions, top]`.

        Computed from the captured logits `router` by the model's own rule: softmax or sigmoid,
        groups, correction bias, scale. Shared experts are not included. Raises MidstreamError if
        `router` was not captured, or if the model's rule is unknown.
        """
        _, blobs, (_, number) = self._tensor(layer, "router", request)
        return routed(
            self.array(layer, "router", request),
            routing_at(blobs[0].header.manifest.routing, number),
        )

    def row(
        self, layer: int | str, position: int, hook: str | None = None, request: int = 0
    ) -> np.ndarray:
        """Return the row at an absolute token position, `[hidden]` float32."""
        positions = self.positions(request)
        if position not in positions:
            raise MidstreamError(
                "not_found",
                f"position {position} was not captured",
                field="position",
                allowed=str(positions),
            )
        return np.asarray(self.array(layer, hook, request)[positions.index(position)])

    def dtype(self, request: int = 0) -> str:
        """Return the dtype in which the rows are stored: float32, float16 or bfloat16."""
        return self._of(request).manifest.dtype

    def manifest(self, request: int = 0) -> Manifest:
        """Return the manifest of the request's first blob."""
        return self._of(request).manifest

    def verify(self) -> list[VerifyFinding]:
        """Compare size, CRC32 and content of every blob with its manifests; also return `gaps`.

        The capture is complete and undamaged if every check is `ok`.
        """
        return [
            _check(blob) for request in self._requests.values() for blob in request.blobs
        ] + self.gaps()

    def gaps(self) -> list[VerifyFinding]:
        """Return a check for each missing part (requests, stages, tensors, dropped positions), and
        for a capture status other than `ok` from the API.
        """
        result = []
        if self.status not in ("", "ok"):
            why = f": {self.detail}" if self.detail else ""
            detail = f"the status of the capture is {self.status}{why}"
            result.append(VerifyFinding(Path(self.job), detail=detail))
        if why := self._missing_requests():
            result.append(VerifyFinding(Path(self.job), detail=why))
        for number, request in self._requests.items():
            path = request.blobs[0].place.path
            if why := request.incomplete():
                result.append(VerifyFinding(path, detail=why, request=number))
            if dropped := request.dropped:
                detail = (
                    f"request {number}: positions dropped under overload: "
                    f"{as_ranges(dropped, _SHOWN_RANGES)} ({len(dropped)} in total)"
                )
                result.append(VerifyFinding(path, detail=detail, request=number))
        return result

    def _missing_requests(self) -> str:
        """Return an error message that lists the present requests; empty if none is missing."""
        present = list(self._requests)
        if len(present) >= self._expected:
            return ""
        return (
            f"job {self.job} captured {self._expected} requests, but files exist for only "
            f"{len(present)}: {as_ranges(present, _SHOWN_RANGES)}"
        )

    def _of(self, request: int) -> _Request:
        if request not in self._requests:
            raise MidstreamError(
                "not_found",
                f"request {request} has no captured rows",
                field="request",
                allowed=str(list(self._requests)),
            )
        result = self._requests[request]
        if not self._partial and (why := result.incomplete()):
            raise MidstreamError("capture_failed", why, hint=_PARTIAL)
        return result

    def _hook(self, hook: str | None, request: int) -> str:
        if hook is not None:
            return ALIASES.get(hook, hook)
        hooks = [ALIASES.get(hook, hook) for hook in self.hooks(request)]
        return DEFAULT_HOOK if DEFAULT_HOOK in hooks or len(hooks) != 1 else hooks[0]

    def _tensor(
        self, layer: int | str, hook: str | None, request: int
    ) -> tuple[_Request, list[BlobReader], tuple[str, int]]:
        """Return the request, the blobs of a site, and the site: its hook point and layer."""
        if (site := full_name(layer)) and hook is None:
            hook, layer = site
        if not isinstance(layer, int | np.integer):
            raise invalid(
                "layer",
                f"{layer!r} is not a layer",
                allowed="a number, or a full name such as "
                '"blocks.12.hook_resid_post" without `hook`',
            )
        result = self._of(request)
        chosen = self._hook(hook, request)
        if layer < 0:
            layer = _from_the_end(layer, result.manifest)
        blobs = result.sites.get((chosen, layer))
        if not blobs:
            layers = self.layers(request, chosen)
            raise MidstreamError(
                "not_found",
                f"layer {layer} was not captured at {self.hook_names.get(chosen, chosen)}",
                field="layer",
                allowed=str(layers) if layers else f"hooks {', '.join(self.hooks(request))}",
            )
        return result, blobs, (chosen, int(layer))


def _from_the_end(layer: int, manifest: Manifest) -> int:
    """Convert a negative layer number, counted from the model's last layer, -1."""
    if not manifest.num_layers:
        raise invalid(
            "layer",
            f"layer {layer} counts from the model's last layer, but this capture does not "
            "record the number of layers",
            allowed="a layer from 0: an older version of Midstream wrote this capture",
        )
    if layer < -manifest.num_layers:
        raise invalid(
            "layer",
            f"{layer} is below the first layer",
            allowed=f"{-manifest.num_layers} to {manifest.num_layers - 1}",
        )
    return manifest.num_layers + layer


def _last_whole(attempts: dict[int, list[BlobReader]]) -> _Request:
    """Return the last complete attempt; if there is none, the last attempt."""
    requests = [_Request(attempts[attempt]) for attempt in sorted(attempts, reverse=True)]
    return next((request for request in requests if not request.missing), requests[0])


def _check(blob: BlobReader) -> VerifyFinding:
    manifest = blob.header.manifest
    crc = blob.crc32()
    wrong = []
    recorded = blob.recorded()
    if recorded is None:
        wrong.append(
            f"{PurePosixPath(index_of(blob.place.key)).name} is missing: without it the "
            "CRC32 cannot be checked"
        )
    elif recorded != (blob.size, crc):
        wrong.append(
            f"{blob.size} bytes with CRC32 {crc:08x}, but the manifest lists {recorded[0]} "
            f"with {recorded[1]:08x}"
        )
    rows = len(manifest.positions)
    for hook, layers in manifest.sites.items():
        for layer in layers:
            tensor = blob.header.tensors.get(f"{hook}.{layer}")
            shape = [rows, manifest.widths.get(hook, manifest.hidden_size)]
            if tensor is None or tensor.shape != shape:
                wrong.append(
                    f"{hook}.{layer} is {'missing' if tensor is None else tensor.shape} (expected: "
                    f"{shape})"
                )
    for name, values in (("positions", manifest.positions), ("token_ids", manifest.token_ids)):
        if name not in blob.header.tensors or blob.unchecked(name).tolist() != values:
            wrong.append(f"the tensor {name} does not match the manifest")
    return VerifyFinding(
        path=blob.place.path,
        bytes=blob.size,
        crc32=crc,
        ok=not wrong,
        detail="; ".join(wrong),
        request=manifest.request,
        offset=blob.place.offset,
    )
