"""Source runs (stored captures of a job whose rows can be patched into other requests), and the
names of these rows.
"""

from itertools import chain
from typing import Literal, NamedTuple

import msgspec

from ..artifacts.loras import LoraUse
from ..base.errors import Translated
from ..base.records import Record
from ..prompts.selectors import Hook, KeyedByHook, Sites, as_ranges, ranges_of
from .specs import Tag

RunState = Literal["pending", "ready", "failed", "deleted"]


class RunRecord(Record, omit_defaults=True):
    """The record of a named run in the ledger.

    A job's captures never change, so the rows that a run refers to do not change either.
    """

    name: str
    model: str
    job: str
    tag: str  # of the captures
    created: float
    lora: LoraUse | None = None  # the adapter with which its rows were computed
    # identity of the model that computed the rows; empty: from a version without identities
    identity: str = ""


class RunPrompt(KeyedByHook, Record):
    """One prompt's rows in a run. Every site has all positions."""

    request: int  # index of the prompt in the run's job
    tokens: int  # of the prompt
    sites: Sites  # hook → ascending layers
    positions: list[int]  # absolute, ascending
    token_ids: list[int]  # the token at each position
    dtype: str
    hidden_size: int  # 0: the run has no rows of the residual stream
    bytes: int  # of the rows


class RunView(RunRecord, omit_defaults=False, kw_only=True):
    """Answer of `GET /v1/runs/{name}`; the listing omits `prompts`."""

    state: RunState
    detail: str = ""  # why it is not ready
    bytes: int = 0
    in_use: int = 0  # jobs that hold it now, on any worker
    held_by: list[str] = []  # workers that have it in memory now
    prompts: list[RunPrompt] | None = None


class RunPage(Record):
    """Answer of `GET /v1/runs`, newest first."""

    runs: list[RunView]
    next: str | None = None  # pass as `?cursor=`


class RunFile(Record):
    """One durable blob of a run, see `schemas.jobs.captures`."""

    path: str  # relative to the capture root
    offset: int
    bytes: int
    crc32: int


class RunFiles(Record):
    """The files of one prompt of a run. A rank reads the blobs that contain its own sites."""

    key: str  # `run_key`
    sites: Sites
    positions: list[int]
    hidden_size: int  # 0: the run has no rows of the residual stream
    bytes: int  # of all rows, over all ranks
    files: list[RunFile]


def run_key(job: str, request: int, tag: Tag) -> str:
    """Return the key of one prompt's captures under one tag of a job. It identifies their content,
    because the captures of a settled job never change.
    """
    return f"{job}.{request}.{tag}"


def parse_key(key: str) -> tuple[str, int, Tag]:
    """Invert `run_key`. Raises ValueError for an invalid key."""
    with Translated(ValueError, lambda _: ValueError(f"{key!r} is not a run's key")):
        job, request, tag = key.split(".")
        return job, int(request), tag


ROW_PREFIX = "run:"
#: Name of a vector of zeros of the model's width, for which no bytes are stored.
ZEROS = "zeros"


class RunRow(NamedTuple):
    """A vector from a run: its row at a position, or the mean over several positions."""

    key: str  # `run_key`
    hook: Hook
    layer: int
    position: int | None  # None: the mean over `mean`
    mean: tuple[int, ...] = ()  # ascending positions; empty: all


def row_name(row: RunRow) -> str:
    """Return the row's name in `StoredSteering.tensors`. It identifies the content like a hash, see
    `run_key`.
    """
    where = (
        str(row.position) if row.position is not None else f"mean {as_ranges(row.mean)}".rstrip()
    )
    return f"{ROW_PREFIX}{row.key}:{row.hook}:{row.layer}:{where}"


def is_row(name: str) -> bool:
    return name.startswith(ROW_PREFIX)


def parse_row(name: str) -> RunRow:
    """Invert `row_name`. Raises ValueError for an invalid name."""
    with Translated(
        (ValueError, msgspec.ValidationError),
        lambda _: ValueError(f"{name!r} is not a valid name for a row of a source run"),
    ):
        _, key, hook, layer, where = name.split(":")
        if not where.startswith("mean"):
            return RunRow(key, msgspec.convert(hook, Hook), int(layer), int(where))
        over = where.removeprefix("mean").strip()
        positions = chain.from_iterable(ranges_of(over) if over else [])
        return RunRow(key, msgspec.convert(hook, Hook), int(layer), None, tuple(positions))


def runs_named(names: "list[str] | set[str]") -> list[str]:
    """Return the sorted, unique keys of the runs that names of tensors refer to."""
    return sorted({parse_row(name).key for name in names if is_row(name)})
