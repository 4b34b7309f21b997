"""Patch studies of two prompts: sweep, zoom in, draw, save.

study = PatchStudy("The Eiffel Tower is in", "The Colosseum is in", " Paris", " Rome")
study.sweep(hooks=["resid_pre", "attn_out", "mlp_out"])
study.plot("eiffel.png")
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Self, TypeVar, Unpack, overload

import msgspec
from msgspec.structs import asdict

from midstream.client import values
from midstream.client.render import figures
from midstream.client.sdk import wire
from midstream.client.sdk.calls import Awaits, Blocking, call
from midstream.client.sdk.client import AsyncClient, Client, Verbs
from midstream.schemas.base.errors import MidstreamError, Translated, invalid, misfit
from midstream.schemas.base.records import Record, from_json, to_json
from midstream.schemas.base.version import __version__
from midstream.schemas.prompts.selectors import ALIASES, HookName, LayerSelector
from midstream.schemas.prompts.sites import asked_names, renamed

from ..records.sweeps import (
    HEAD_AXES,
    TEXTS,
    PairResult,
    PairSpan,
    PatchPlace,
    PatchWindow,
    SweepPair,
    SweepRequest,
    SweepResult,
)
from ..show import notebook
from . import grid as grids, sweeps
from .fields import StudyFields
from .grid import Effect, Grid
from .progress import bar

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from rich.console import RenderableType
B = TypeVar("B", bound=Blocking)
C = TypeVar("C", Client, AsyncClient)
P = ParamSpec("P")
S = TypeVar("S")
#: A pair as users write it; as a tuple: clean, corrupt, answer, foil.
PairInput = SweepPair | Mapping[str, Any] | Sequence[str | list[int] | None]
#: The format and version of a saved study.
_FORMAT = "midstream patch study"
_VERSION = 1


class Region(Record):
    """A part of a grid, for `zoom`; None: all. `columns`: labels or numbers."""

    hooks: list[HookName] | None = None
    layers: LayerSelector | None = None
    columns: list[str | int] | None = None


class _Saved(Record):
    format: str
    version: int
    midstream: str  # the version that wrote the file
    job: str
    request: SweepRequest
    result: SweepResult


class _Header(msgspec.Struct):
    """The header of a study file; other fields are ignored."""

    format: str = ""
    version: int = 0
    midstream: str = "an unknown version"


class _study_call(call[P, Any]):
    """A call that returns a study of the class on which it is called."""

    if TYPE_CHECKING:

        @overload
        def __get__(self, client: None, kind: type[Any]) -> Any: ...
        @overload
        def __get__(self, client: B, kind: type[Any]) -> Callable[P, B]: ...
        @overload
        def __get__(self, client: S, kind: type[Any]) -> Callable[P, Coroutine[Any, Any, S]]: ...
        def __get__(self, client: Any, kind: type[Any]) -> Any: ...


class _Study(Generic[C]):
    """Base of both classes of study; holds the request and its result.

    Each call is written once for both, see `client.sdk.calls`.
    """

    def __init__(
        self,
        clean: str | list[int],
        corrupt: str | list[int] | None = None,
        answer: str | list[int] | None = None,
        foil: str | list[int] | None = None,
        *,
        client: C | None = None,
        model: str | None = None,
    ):
        self._client: C | None = client
        self._pairs = [_pair({"clean": clean, "corrupt": corrupt, "answer": answer, "foil": foil})]
        # of a study that `zoom` returned: the pairs of the original study
        self._unzoomed: list[SweepPair] | None = None
        self._model = model
        self._request: SweepRequest | None = None
        self._result: SweepResult | None = None
        #: The id of the last sweep's job. Its captures under the tags `base` and `source` hold the
        #: rows of the unpatched prompts.
        self.job = ""

    @classmethod
    def pairs(
        cls, pairs: Sequence[PairInput], *, client: C | None = None, model: str | None = None
    ) -> Self:
        """Build a study of several pairs; their grids must have the same number of columns (see
        `spans`).
        """
        study = cls("", client=client, model=model)
        study._pairs = _pairs(pairs)
        return study

    @classmethod
    def of(
        cls, job: str, request: SweepRequest, result: SweepResult, client: C | None = None
    ) -> Self:
        """Build a study of a sweep that was submitted without a study."""
        return cls.pairs(request.pairs, client=client, model=request.model)._keep(
            job, request, result
        )

    @classmethod
    def load(cls, path: Path | str, client: C | None = None) -> Self:
        """Load a study from a file of `save`.

        Raises MidstreamError if the file is not a study or has another version; OSError.
        """
        return cls("", client=client)._read(path)

    def __repr__(self) -> str:
        first = self._pairs[0]
        what = (
            f"{first.clean!r}, {first.corrupt!r}"
            if len(self._pairs) == 1
            else f"{len(self._pairs)} pairs"
        )
        if self._result is None:
            return f"{type(self).__name__}({what}): no sweep yet"
        summary = self._result.summary
        notes = sum(len(pair.notes) for pair in self._result.pairs)
        return (
            f"{type(self).__name__}({what}): {summary.metric} of {summary.cells} cells, "
            f"{summary.skipped} skipped"
            + (f"; .show() prints the notes ({notes})" if notes else "")
        )

    def _repr_png_(self) -> bytes | None:
        return None if self._result is None else notebook.sweep_png(self._result)

    def _repr_html_(self) -> str | None:
        return None if self._result is None else notebook.sweep_html(self._result)

    @property
    def request(self) -> SweepRequest:
        """The request of the last sweep. Raises MidstreamError before the first sweep."""
        return _swept(self._request)

    @property
    def result(self) -> SweepResult:
        """The result of the last sweep. Raises MidstreamError before the first sweep."""
        return _swept(self._result)

    def grid(self, pair: int | None = None) -> Grid:
        """Return the grids of one pair, or of the mean over all pairs, as numpy arrays."""
        return grids.grid_of(self.result, pair)

    def top(self, count: int = 10, pair: int | None = None) -> list[Effect]:
        """Return the cells that change the metric most, strongest first."""
        return self.grid(pair).top(count)

    def plot(self, path: Path | str | None = None, *, pair: int | None = None) -> Figure:
        """Draw tokens by layers, one panel for each hook: one pair, or the mean over all pairs.

        `path`: save the figure there, in the format of the extension. Raises MidstreamError if
        matplotlib is not installed.
        """
        return figures.plot(self.result, path, pair=pair)

    def show(self, pair: int | None = None) -> None:
        """Print the heatmap on the terminal, with the strongest cells, notes and skipped cells."""
        from rich.console import Console

        Console(highlight=False).print(self.report(pair))

    def report(self, pair: int | None = None, count: int = 5) -> RenderableType:
        """Return what `show` prints, for a console of rich. `count`: of the strongest cells."""
        from ..show.sweeps import report

        return report(self.result, pair, count)

    def to_records(self) -> list[dict[str, Any]]:
        """Return one dict for each cell of each pair: pair, hook, layer, column, label, positions,
        value, effect, reason.
        """
        return grids.records(self.result)

    def to_pandas(self) -> pandas.DataFrame:
        """Return the records as a data frame.

        Raises MidstreamError if pandas is not installed; `to_records` does not need it.
        """
        frame: pandas.DataFrame = self.result.to_pandas()
        return frame

    def save(self, path: Path | str) -> None:
        """Write request and result as JSON, for `load`."""
        saved = _Saved(
            format=_FORMAT,
            version=_VERSION,
            midstream=__version__,
            job=self.job,
            request=self.request,
            result=renamed(self.result, ALIASES),
        )
        Path(path).write_bytes(to_json(saved))

    def _read(self, path: Path | str) -> Self:
        raw = Path(path).read_bytes()
        with Translated(
            (msgspec.ValidationError, msgspec.DecodeError),
            lambda error: invalid("path", f"{path} is not a saved study: {error}"),
        ):
            header = from_json(raw, _Header)
        if header.format != _FORMAT:
            raise invalid("path", f"{path} is not a saved study")
        if header.version != _VERSION:
            raise MidstreamError(
                "version_mismatch",
                f"{path} was written by {header.midstream} in format {header.version}; "
                f"{__version__} reads format {_VERSION}",
            )
        with Translated(
            msgspec.ValidationError,
            lambda error: invalid(
                "path",
                f"{path}, written by {header.midstream}: {': '.join(reversed(misfit(error)))}",
            ),
        ):
            saved = from_json(raw, _Saved)
        self._pairs = saved.request.pairs
        self._model = saved.request.model
        return self._keep(saved.job, saved.request, saved.result)

    def _keep(self, job: str, request: SweepRequest, result: SweepResult) -> Self:
        self.job = job
        self._request = request
        self._result = renamed(result, asked_names(request))
        return self

    def _build_request(
        self,
        model: str,
        spans: Sequence[PairSpan | Mapping[str, Any]] | None,
        fields: dict[str, Any],
    ) -> SweepRequest:
        """Build the request of a sweep over the study's pairs."""
        pairs = self._pairs
        if spans is not None or "positions" in fields:
            # these replace the pair's own columns, such as those set by `zoom`
            columns = {"spans": None if spans is None else list(spans), "positions": None}
            pairs = [
                _pair({**asdict(pair), **columns}, f"pairs[{number}]")
                for number, pair in enumerate(self._unzoomed or pairs)
            ]
        return sweeps.sweep_request(None, {"model": model, "pairs": pairs, **fields}, SweepRequest)

    def _zoomed(
        self,
        region: Region | Effect | None,
        columns: Sequence[str | int] | None,
        fields: dict[str, Any],
    ) -> tuple[list[SweepPair], dict[str, Any]]:
        """Return the pairs and the fields of a sweep over each token of a region separately; each
        token keeps its counterpart in the other prompt.
        """
        last = self.request
        result = self.result
        # the other direction patches the other prompt
        reversed_ = fields.get("direction", result.direction) != result.direction
        part = _around(region, result) if isinstance(region, Effect) else region or Region()
        hooks = fields.pop("hooks", None) or part.hooks or last.hooks
        layers = [fields.pop("layers", None), part.layers, last.layers]
        columns = columns or part.columns
        pairs = []
        for number, pair in enumerate(last.pairs):
            results = result.pairs[number]
            places = _places(results, _numbers(results.labels, columns))
            if not places:
                raise invalid("columns", f"no column could be patched in pair {number}")
            changes: dict[str, Any] = {
                "spans": None,
                "positions": sorted({other if reversed_ else place for place, other in places}),
            }
            if any(results.sources) and "alignment" not in fields:
                clean_first = result.direction == "noise"
                changes["alignment"] = [
                    (place, other) if clean_first else (other, place) for place, other in places
                ]
            pairs.append(msgspec.structs.replace(pair, **changes))
        request = (
            asdict(last)
            | _zoomed_axis(result, columns)
            | {
                "window": PatchWindow(),
                "hooks": hooks,
                "layers": next(given for given in layers if given is not None),
            }
        )
        for name in ("model", "pairs", "positions"):
            del request[name]
        return pairs, request | fields

    @_study_call
    async def sweep(
        self,
        /,
        *,
        spans: Sequence[PairSpan | Mapping[str, Any]] | None = None,
        progress: bool | sweeps.OnSweepEvent = True,
        **fields: Unpack[StudyFields],
    ) -> Self:
        """Submit a sweep, wait, and keep its result; return the study.

        `fields`: hooks, layers, positions, axis, heads, neurons, path, metric, window, direction,
        ablation, alignment, alpha, mask, noise, as in `POST /v1/sweeps`. `spans`: columns of
        several tokens, for all pairs.

        `progress`: True for a bar on a terminal or in a notebook; or a callable that gets every
        event of the sweep.
        """
        return await self._swept(progress, spans, **fields)

    @_study_call
    async def zoom(
        self,
        /,
        region: Region | Effect | None = None,
        *,
        columns: Sequence[str | int] | None = None,
        progress: bool | sweeps.OnSweepEvent = True,
        **fields: Unpack[StudyFields],
    ) -> Self:
        """Sweep a part of this study's grid, each token of the columns and each layer separately
        (window 1); return a new study of it.

        `region`: a `Region`, or a cell of `top()`, which stands for its hook, its tokens, and the
        layers around it. `fields`: other changes to this study's sweep.
        """
        pairs, request = self._zoomed(region, columns, dict(fields))
        study = type(self).pairs(pairs, client=self._client, model=self.request.model)
        study._unzoomed = self.request.pairs
        return await study._swept(progress, **request)

    async def _swept(
        self,
        progress: bool | sweeps.OnSweepEvent,
        spans: Sequence[PairSpan | Mapping[str, Any]] | None = None,
        **fields: Any,
    ) -> Self:
        async with self._connected() as client:
            request = self._build_request(
                self._model or wire.only_model(await client.models()), spans, fields
            )
            with bar() if progress is True else nullcontext(progress or None) as show:
                job = (await client.sweeps.submit(request)).id
                return self._keep(job, request, await client.sweeps.result(job, show, cancel=True))

    def _connected(self) -> AbstractAsyncContextManager[Verbs[Awaits]]:
        """Open the client's calls as coroutines; a default client is closed after the block."""
        raise NotImplementedError


class PatchStudy(Blocking, _Study[Client]):
    """A patch study of two prompts that differ in what they ask: `answer` follows `clean`, `foil`
    follows `corrupt`. Without `corrupt`: an ablation.

    `client`: by default a new `Client()`. `model`: by default the only served model.
    """

    @property
    def _awaited(self) -> Self:
        return self

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Verbs[Awaits]]:
        with nullcontext(self._client) if self._client else Client() as client:
            yield client._awaited


class AsyncPatchStudy(_Study[AsyncClient]):
    """`PatchStudy` with an `AsyncClient`: `await study.sweep()`, `await study.zoom(…)`."""

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Verbs[Awaits]]:
        async with nullcontext(self._client) if self._client else AsyncClient() as client:
            yield client


def _pairs(pairs: Sequence[PairInput]) -> list[SweepPair]:
    if not pairs:
        raise invalid("pairs", "give at least one pair")
    return [_pair(pair, f"pairs[{number}]") for number, pair in enumerate(pairs)]


def _pair(pair: PairInput, field: str = "") -> SweepPair:
    """Convert a pair in any form. Raises MidstreamError naming the field."""
    if isinstance(pair, SweepPair):
        return pair
    if not isinstance(pair, Mapping):
        if isinstance(pair, str) or not 1 <= len(pair) <= 4:
            raise invalid(field, "give a pair as (clean, corrupt, answer, foil), or as its fields")
        pair = dict(zip(TEXTS, pair, strict=False))
    return values.checked(dict(pair), SweepPair, field)


def _around(cell: Effect, result: SweepResult) -> Region:
    """Return the region around a cell: its hook and tokens, and the layers between it and the next
    swept layers or within the window.
    """
    place = result.layers.index(cell.layer)
    reach = result.window.layers
    first = min(result.layers[max(place - 1, 0)], cell.layer - reach)
    last = max(result.layers[min(place + 1, len(result.layers) - 1)], cell.layer + reach)
    layers = range(max(first, result.layers[0]), min(last, result.layers[-1]) + 1)
    return Region(hooks=[cell.hook], layers=list(layers), columns=[cell.column])


def _zoomed_axis(result: SweepResult, columns: Sequence[str | int] | None) -> dict[str, Any]:
    """Return the fields of a zoom's axis: each position separately, for the heads of these columns
    if the sweep was over heads.
    """
    if result.axis == "neuron":
        raise invalid(
            "axis",
            "a sweep over neurons cannot be zoomed",
            allowed="sweep(axis='neuron', neurons={'sets': …})",
        )
    if result.axis not in HEAD_AXES:
        return {"axis": "position"}
    pair = result.pairs[0]
    numbers = _numbers(pair.labels, columns)
    return {"axis": "head_position", "heads": sorted({pair.heads[number] for number in numbers})}


def _places(pair_result: PairResult, columns: Iterable[int]) -> list[PatchPlace]:
    """Return (position in the patched prompt, position of the source row) pairs, ascending.

    Raises MidstreamError if a position gets rows of two source positions.
    """
    places: dict[int, int] = {}
    if not pair_result.positions:
        return []
    # an ablation has no source prompt
    sources = pair_result.sources if any(pair_result.sources) else pair_result.positions
    for column in columns:
        for place, other in zip(pair_result.positions[column], sources[column], strict=True):
            if places.setdefault(place, other) != other:
                raise invalid(
                    "columns",
                    f"position {place} gets rows of both positions {places[place]} and {other}",
                    allowed="columns with one source position for each position",
                )
    return sorted(places.items())


def _numbers(labels: list[str], columns: Sequence[str | int] | None) -> Sequence[int]:
    """Return the numbers of columns; None: of all."""
    if columns is None:
        return range(len(labels))
    return [_column(labels, column) for column in columns]


def _column(labels: list[str], column: str | int) -> int:
    """Return the number of a column, given by its label or number."""
    if isinstance(column, int):
        if -len(labels) <= column < len(labels):
            return column % len(labels)
        raise invalid("columns", f"no column {column}", allowed=f"0 to {len(labels) - 1}")
    numbers = [
        number for number, label in enumerate(labels) if column in (label, grids.written(label))
    ]
    if len(numbers) != 1:
        raise invalid(
            "columns",
            f"{len(numbers)} columns are called {column!r}",
            allowed=", ".join(map(repr, labels)),
            hint="give the column's number" if numbers else None,
        )
    return numbers[0]


def _swept(found: S | None) -> S:
    if found is None:
        raise MidstreamError("not_found", "no sweep yet: call sweep() first")
    return found
