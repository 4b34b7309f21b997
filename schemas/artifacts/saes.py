"""Sparse autoencoders (SAEs): how they are registered, and what a job keeps of one."""

from typing import Annotated, Literal

import msgspec

from ..base.limits import MAX_DESCRIPTION, MAX_PATH, MAX_SAE_WIDTH, Count, Index, Name, PathName
from ..base.records import Record
from ..prompts.selectors import Hook, HookName

#: How a pre-activation becomes an activation, by SAELens' names.
Architecture = Literal["standard", "jumprelu", "gated", "topk"]
#: What is done to a row before it is encoded, by SAELens' names (`interventions.NORMS`); others
#: need statistics of a data set.
Normalisation = Literal["none", "layer_norm", "constant_norm_rescale"]


class SaeForm(Record):
    """Everything about an SAE that decides its arithmetic, apart from its tensors."""

    architecture: Architecture
    d_in: Count  # width of the rows that it reads
    d_sae: Annotated[int, msgspec.Meta(ge=1, le=MAX_SAE_WIDTH)]  # features
    apply_b_dec_to_input: bool = True  # the decoder's bias is taken from a row before it is encoded
    normalize_activations: Normalisation = "none"
    k: Index = 0  # of `topk`: features that are active, at most
    # of `topk`: activations are times the norm of their decoder rows
    rescale_acts_by_decoder_norm: bool = False


class StoredSae(Record):
    """An SAE as a job keeps it: what is loaded must have this content, even if the name has another
    content now.
    """

    name: str
    digest: str  # of its files, see `sae_files`
    path: str  # of its folder, below `sae_dir`
    hook: Hook
    layer: int
    bytes: int  # of its weights in float32


class SaeRequest(Record):
    """Body of `POST /v1/saes`."""

    name: PathName
    # of the folder, relative to the setting `sae_dir`
    path: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_PATH)]
    # required where the files do not name it (Gemma Scope's); else it must be theirs
    hook: HookName | None = None
    layer: Index | None = None  # likewise
    model: Name | None = None  # required only if several are served
    description: Annotated[str, msgspec.Meta(max_length=MAX_DESCRIPTION)] = ""


class Sae(Record):
    """A registered SAE, as the ledger keeps it and as it is shown."""

    name: str
    model: str
    digest: str
    path: str
    hook: Hook
    layer: int
    form: SaeForm
    bytes: int  # of its weights in float32
    created: float
    trained_on: str = ""  # the model, as the files name it
    description: str = ""
    replaced: str = ""  # digest that the name had until this request

    def replacing(self, former: "Sae") -> "Sae":
        """With the digest that the name had, if that was another one."""
        return (
            self
            if former.digest == self.digest
            else msgspec.structs.replace(self, replaced=former.digest)
        )

    def stored(self) -> StoredSae:
        return StoredSae(
            name=self.name,
            digest=self.digest,
            path=self.path,
            hook=self.hook,
            layer=self.layer,
            bytes=self.bytes,
        )


class SaePage(Record):
    """Answer of `GET /v1/saes`."""

    saes: list[Sae]
