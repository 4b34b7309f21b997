"""Tuned lenses as they are registered: an affine map for each layer."""

from ..base.limits import MAX_TUNED
from ..base.records import Record
from ..prompts.selectors import Hook, HookName
from .registered import ArtifactKind, FolderRequest, RegisteredFolder

#: Hook points whose rows the final norm and the head can read: the stream, and what is added to it.
LENS_HOOKS: tuple[Hook, ...] = ("pre_attn", "attn_out", "post_attn", "mlp_out", "post_block")


class StoredTuned(Record):
    """A tuned lens as a job stores it. The job uses this content, even if the name has since been
    given another.
    """

    name: str
    digest: str  # SHA-256 of its file
    path: str  # of its folder, below `artifacts_dir/lenses`
    residual: bool  # its maps give what is added to a row


class TunedLensRequest(FolderRequest):
    """Body of `PUT /v1/artifacts/lenses/{name}`."""

    hook: HookName = "post_block"  # whose rows the maps take
    residual: bool = False  # the maps give what is added to a row: h + W h + b instead of W h + b


class TunedLens(RegisteredFolder, kw_only=True):
    """A registered tuned lens, as the ledger keeps it and as it is shown."""

    hook: Hook
    residual: bool
    layers: list[int]  # that have a map, ascending
    hidden_size: int

    def stored(self) -> StoredTuned:
        return self.as_kept(StoredTuned)


TUNED_LENSES = ArtifactKind(
    plural="lenses",
    short="tuned",
    noun="tuned lens",
    record=TunedLens,
    request=TunedLensRequest,
    takes="tuned lenses. `path` is a folder below `lenses` in `artifacts_dir` with "
    "`lens.safetensors`: `{layer}.weight` and `{layer}.bias` of each layer.",
    make="midstream.api.routes.registered:make_tuned",
    name="lens",
    calls="midstream.client.sdk.registered:Lenses",
    limit=MAX_TUNED,
)
