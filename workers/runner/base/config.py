"""Configuration of a rank at boot.

Values that compiled graphs depend on (version, buffer layout, traced code) are passed by vLLM's
`additional_config`, which is part of the compile cache's key. The others change with every boot,
and are passed by one environment variable, which is not part of the key.
"""

import os
from dataclasses import dataclass

import msgspec

from ....schemas.base.records import Record, from_json, to_json
from ....schemas.base.version import __version__
from ....schemas.extensions import Extension
from ....schemas.jobs.models import SHOWN_IDENTITY
from ....schemas.model.attention import AttentionKind
from ....schemas.model.banks import RowShape

VARIABLE = "_MIDSTREAM_PLANE"
#: Fields of `PlaneConfig` that each machine of an engine has of its own.
OF_MACHINE = (
    "relay_url",
    "outbox_dir",
    "capture_root",
    "spill_dir",
    "lens_dir",
    "cores",
    "curve_secret_file",
    "curve_server_key",
)


@dataclass(frozen=True)
class RankPlace:
    """Position of this rank: global rank, number of ranks, rank in its stage, stage, number of
    stages, in the order of the fields.
    """

    rank: int
    world: int
    tp: int
    pp: int
    stages: int

    @property
    def grades(self) -> bool:
        """Return whether this rank grades next tokens."""
        return self.tp == 0 and self.pp == self.stages - 1


class Found(Record):
    """A rank's report on the model that it loaded."""

    hooks: list[str] = []  # hooks of the residual stream that every layer has
    inside: dict[str, RowShape] = {}  # requested hooks inside the layers that every layer has
    absent: dict[str, str] = {}  # hook → why the model does not have it
    multiplied: list[str] = []  # hooks whose rows some layer multiplies before it adds them
    refused: str = ""  # why the model cannot be served
    readings: dict[str, str] = {}  # kind of reading → why it is not served; empty: it is served
    extensions: list[Extension] = []  # loaded extensions
    enters: bool = False  # forwards may begin above the first layer
    exits: bool = False  # forwards may end below the last layer
    attention: list[AttentionKind] = []  # kinds of the layers that the rank's stage holds


class PlaneConfig(Record):
    """Configuration that a rank gets once, at boot."""

    version: str
    worker: str
    boot: str
    relay_url: str
    outbox_dir: str
    capture_root: str
    hooks: list[str]  # residual-stream hooks to install; empty: all that the model has
    steering_rows: int  # distinct configurations in one step, the sentinel row not counted
    steering_entries: int  # pool entries, the sentinel not counted
    step_tokens: int  # token rows in one step, at most
    # captured rows of one step, at most: size of each half of an accelerator's ring; 0: no ring
    step_rows: int
    capture_queue_mib: int
    capture_window_mib: int
    capture_overload: str  # block | spill | drop
    spill_dir: str
    row_store_mib: int
    sweep_entry: bool  # forwards may begin above the first layer, where they run as Python
    writer_threads: int
    segment_limit_kib: int
    segment_mib: int
    memory_limit_kib: int
    capture_quota_mib: int
    cores: list[int]  # cores that the worker may run on; vLLM binds each rank to some of them
    graph_families: bool = True  # idle steps have CUDA graphs of their own
    # the process that writes a rank's files must answer within so many seconds; else the engine
    # ends, early enough for other workers to run its jobs again
    answer_s: float = 20.0
    log_format: str = "text"
    log_level: str = "INFO"
    extensions: list[str] = []  # packages whose extensions are loaded
    fault: str = ""  # tests only: the setting `fault`
    curve_secret_file: str = ""  # see `broker.receipts.curve`
    curve_server_key: str = ""
    inside: list[str] = []  # hooks inside the layers to install where the model has them
    lens_dir: str = ""  # folder below which tuned lenses are
    identity: str = ""  # the model's identity, for receipts and manifests
    # for manifests: caveats of the model, its quantisation and the engine's options; certification
    # may add some
    caveats: list[str] = []

    def export(self) -> None:
        """Hand the config to the engine processes started after this."""
        os.environ[VARIABLE] = to_json(self).decode()


def plane_config() -> PlaneConfig:
    """Return the config that the worker exported; raises RuntimeError when versions differ."""
    config = from_json(os.environ[VARIABLE], PlaneConfig)
    if config.version != __version__:
        raise RuntimeError(
            f"this rank runs Midstream {__version__}, but its worker runs {config.version}: "
            "install one version on both"
        )
    return config


def join(of_first: str) -> None:
    """Take over rank 0's config, which the worker made for this start of the engine; what is of
    this machine stays. Raises RuntimeError if this machine has another model.
    """
    own = plane_config()
    start = from_json(of_first, PlaneConfig)
    if own.identity != start.identity:
        raise RuntimeError(
            f"the model on this machine has the identity {own.identity[:SHOWN_IDENTITY]}, but that "
            f"of the first machine has {start.identity[:SHOWN_IDENTITY]}: every machine needs the "
            "same checkpoint, dtype and engine options"
        )
    msgspec.structs.replace(start, **{name: getattr(own, name) for name in OF_MACHINE}).export()
