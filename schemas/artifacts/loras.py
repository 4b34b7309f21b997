"""LoRA adapters: registration, the form that a job stores, and the linear layers of a model that
they may change.
"""

from ..access.handling import Handling
from ..base.limits import MAX_LORAS, Reference
from ..base.records import Record
from .registered import ArtifactKind, FolderRequest, RegisteredFolder


class LoraModule(Record):
    """A linear layer of the model that an adapter may change, in some of its decoder layers."""

    inputs: int
    outputs: int
    layers: str = ""  # their numbers, such as `0-31`; empty: the module's name has no number


class LoraSupport(Record):
    """LoRA adapters that a worker accepts.

    `modules`: name with `*` for the layer's number → one entry for each shape that it has.
    """

    max_rank: int
    modules: dict[str, list[LoraModule]]


class StoredLora(Record):
    """An adapter as a job stores it. The job uses this content even if the name has been registered
    again since.
    """

    name: str
    digest: str  # of its files, see `lora_files`
    path: str  # of its folder, below `artifacts_dir/loras`
    bytes: int = 0  # of its weights


class LoraUse(Record):
    """The adapter with which rows are computed, as named in requests to ranks, results and
    manifests.
    """

    name: str
    digest: str


def use_of(lora: StoredLora | None) -> LoraUse | None:
    return None if lora is None else LoraUse(name=lora.name, digest=lora.digest)


class Adapted(Handling, kw_only=True):
    """Fields of every submission whose rows may be computed with an adapter."""

    lora: Reference | None = None  # name of the adapter with which everything is computed


class LoraRequest(FolderRequest):
    """Body of `PUT /v1/artifacts/loras/{name}`."""


class Lora(RegisteredFolder, kw_only=True):
    """A registered adapter, as the ledger stores it and the API returns it."""

    rank: int  # the largest rank of its modules
    modules: list[str]  # names of the modules that it changes, with `*` for the layer's number

    def stored(self) -> StoredLora:
        return self.as_kept(StoredLora)


LORAS = ArtifactKind(
    plural="loras",
    short="lora",
    noun="adapter",
    record=Lora,
    request=LoraRequest,
    takes="`path` is a folder below `loras` in `artifacts_dir`, as PEFT saves an adapter.",
    make="midstream.api.routes.registered:make_lora",
    calls="midstream.client.sdk.registered:Loras",
    limit=MAX_LORAS,
)
