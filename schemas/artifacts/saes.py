"""Sparse autoencoders (SAEs): registration, and the form that a job stores."""

from typing import Annotated, Literal

import msgspec

from ..base.limits import MAX_SAE_WIDTH, MAX_SAES, Count, Index
from ..base.records import Record
from ..prompts.selectors import Hook, HookName
from .registered import ArtifactKind, FolderRequest, RegisteredFolder

#: How a pre-activation becomes an activation, by SAELens' names.
Architecture = Literal["standard", "jumprelu", "gated", "topk"]
#: How a row is normalised before encoding, by SAELens' names (`interventions.NORMS`). SAELens'
#: other normalisations need statistics of a data set.
Normalisation = Literal["none", "layer_norm", "constant_norm_rescale"]


class SaeForm(Record):
    """Everything that determines an SAE's arithmetic, apart from its tensors."""

    architecture: Architecture
    d_in: Count  # width of the rows that it reads
    d_sae: Annotated[int, msgspec.Meta(ge=1, le=MAX_SAE_WIDTH)]  # features
    apply_b_dec_to_input: bool = True  # the decoder's bias is subtracted from a row before encoding
    normalize_activations: Normalisation = "none"
    k: Index = 0  # of `topk`: the most features that are active
    # of `topk`: activations are multiplied by the norm of their decoder rows
    rescale_acts_by_decoder_norm: bool = False


class StoredSae(Record):
    """An SAE as a job stores it. The job uses this content even if the name has been registered
    again since.
    """

    name: str
    digest: str  # of its files, see `sae_files`
    path: str  # of its folder, below `artifacts_dir/saes`
    hook: Hook
    layer: int
    bytes: int  # of its weights in float32


class SaeRequest(FolderRequest):
    """Body of `PUT /v1/artifacts/saes/{name}`."""

    # required if the files do not name it (Gemma Scope); otherwise it must agree with them
    hook: HookName | None = None
    layer: Index | None = None  # likewise


class Sae(RegisteredFolder, kw_only=True):
    """A registered SAE, as the ledger stores it and the API returns it."""

    hook: Hook
    layer: int
    form: SaeForm
    trained_on: str = ""  # the model, as the files name it

    def stored(self) -> StoredSae:
        return self.as_kept(StoredSae)


SAES = ArtifactKind(
    plural="saes",
    short="sae",
    noun="sparse autoencoder",
    record=Sae,
    request=SaeRequest,
    takes="`path` is a folder below `saes` in `artifacts_dir` with `cfg.json` and "
    "`sae_weights.safetensors` (SAELens), or with `params.npz` (Gemma Scope), which requires "
    "`hook` and `layer`.",
    make="midstream.api.routes.registered:make_sae",
    calls="midstream.client.sdk.registered:Saes",
    limit=MAX_SAES,
)
