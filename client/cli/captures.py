"""Does what `get`, `check` and `export` ask of captures: of a job, a folder or a bucket."""

from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from rich.markup import escape

from ...schemas.base.errors import MidstreamError
from ...schemas.prompts.selectors import HookName
from ..captures.export import export
from ..captures.reader import CaptureReader
from ..render import jobs as show
from . import options
from .terminal import Connector, out, say


def open_capture(
    connect: Connector,
    source: str,
    job: str | None = None,
    tag: str | None = None,
    partial: bool = False,
) -> CaptureReader:
    """Open a store, folder or file of captures if `source` names one; otherwise a job's captures
    through the API.
    """
    path = Path(source)
    # a job that is stored only in segments has no folder
    if "://" in source or path.exists() or (path.parent / "segments").is_dir():
        return CaptureReader(source, job, tag=tag, partial=partial)
    if "/" in source:
        raise MidstreamError("not_found", f"no such folder: {source}")
    return connect().capture(source, tag=tag, partial=partial)


def show_capture(
    connect: Connector,
    source: str,
    /,
    *,
    layer: Annotated[int, msgspec.Meta(ge=0)] | None = None,
    hook: HookName | None = None,
    job: str | None = None,
    tag: str | None = None,
    partial: bool = False,
) -> None:
    """Print requests, layers, positions, shapes and norms; with `layer` (and `hook`), also these
    rows of the first request.
    """
    reader = open_capture(connect, source, job, tag, partial)
    out.print(show.capture(reader))
    for gap in reader.gaps():
        out.print(f"[yellow]missing:[/] {escape(gap.detail)}", soft_wrap=True)
    if layer is not None:
        first = reader.requests()[0]
        array = reader.array(layer, hook, first)
        with np.printoptions(precision=4, edgeitems=4, threshold=40):
            say(f"layer {layer}, request {first}, float32 {list(array.shape)}\n{array}")
    say(f"files: {reader.files[0].parent}")
    if names := [name for name in reader.tags if name != reader.tag]:
        say(f"tag {reader.tag}; other captures: --set tag={', '.join(names)}")


def check_capture(
    connect: Connector, source: str, /, *, job: str | None = None, tag: str | None = None
) -> None:
    """Recompute every CRC32 and check that no request, stage, site or position is missing. Raises
    MidstreamError if a check fails.
    """
    result = open_capture(connect, source, job, tag, partial=True).verify()
    out.print(show.checks(result))
    wrong = [check for check in result if not check.ok]
    if wrong:
        raise MidstreamError(
            "capture_failed", f"{len(wrong)} of {len(result)} checks failed: {wrong[0].detail}"
        )


def export_capture(
    connect: Connector,
    source: str,
    target: str,
    /,
    *,
    hooks: str | None = None,
    layers: str | int | None = None,
    requests: int | list[int] = (),  # type: ignore[assignment]
    job: str | None = None,
    tag: str | None = None,
    partial: bool = False,
) -> str:
    """Write chosen rows into one file, `.npz` (float32) or `.safetensors` (as captured); into a
    folder, download a job's files and verify them.
    """
    path = Path(target)
    if not path.suffix:
        reader = connect().capture(source, path, partial=partial)
        return f"{show.count(len(reader.files), 'file')} in {path}"
    names = export(
        open_capture(connect, source, job, tag, partial),
        path,
        hooks=options.hooks(hooks, layers) or (),
        layers="all" if layers is None else layers,
        requests=[requests] if isinstance(requests, int) else requests,
    )
    return f"{show.count(len(names), 'array')}, {show.size(path.stat().st_size)}: {path}"
