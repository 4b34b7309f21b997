"""Jacobian lenses as they are registered: for each layer, the mean Jacobian of the final residual
by the layer's output, and how it was fitted.
"""

from typing import Literal

from ..base.limits import MAX_TUNED, Count, Index
from ..base.records import Record
from ..prompts.selectors import LayerSelector
from .registered import ArtifactKind, FolderRequest
from .tuned_lenses import TunedLens

#: Leading positions that fits leave out, and tokens of a prompt that they use: the field's.
SKIP_FIRST = 16
MAX_TOKENS = 128


class JacobianFit(Record):
    """How a Jacobian lens is fitted.

    J = the mean over prompts, and over source positions t, of the sum over target positions t' ≥ t
    of ∂ h_final[t'] / ∂ h_layer[t], with positions from `skip_first` to the last but one (Gurnee et
    al. 2026, "Verbalizable Representations Form a Global Workspace in Language Models").
    """

    layers: LayerSelector = "all"  # all: those below the last
    # output dimensions that each prompt is differentiated by, in turns; null: all, which is exact
    rank: Count | None = None
    seed: Index = 0  # of the dimensions' order, and of the held-out vectors
    skip_first: Index = SKIP_FIRST
    max_tokens: Count = MAX_TOKENS  # later tokens of a prompt are left out


class JacobianRecord(Record):
    """How a Jacobian lens came about, as its folder stores it."""

    method: Literal["exact", "sketched", "imported"]
    prompts: int  # that J is a mean over
    rank: int = 0  # see `JacobianFit`; exact: the hidden size
    seed: int = 0
    skip_first: int = SKIP_FIRST
    max_tokens: int = MAX_TOKENS
    short: int = 0  # prompts without a position that counts, which are left out
    not_finite: int = 0  # gradients with numbers that are not finite, which are left out
    # of a sketch, by layer in ascending order: ‖V(Ĵ − J)‖ / ‖VJ‖ on held-out random vectors V,
    # whose VJ is exact; an estimate of the relative error in the Frobenius norm
    errors: list[float] = []
    source: dict[str, str] = {}  # of an imported lens: what its file states


class StoredLensFit(Record, tag="jacobian_lens"):
    """A fit of a Jacobian lens after validation, as a job stores it."""

    name: str  # of the lens
    layers: list[int]
    prompts: list[list[int]]  # token ids
    fit: JacobianFit
    hidden_size: int  # of the model
    folder: str = ""  # below `artifacts_dir/lenses`; every attempt writes a folder of its own in it
    description: str = ""  # of the lens

    @property
    def title(self) -> str:
        """Return the text by which people recognise the job."""
        return f"{self.name}: Jacobian lens"

    @property
    def tokens(self) -> int:
        """Return an estimate of the tokens that it computes: a backward pass for each dimension."""
        used = sum(min(len(tokens), self.fit.max_tokens) for tokens in self.prompts)
        return used * (1 + (self.fit.rank or self.hidden_size))


class JacobianLensRequest(FolderRequest):
    """Body of `PUT /v1/artifacts/jacobians/{name}`."""


class JacobianLens(TunedLens):
    """A registered Jacobian lens, as the ledger keeps it and as it is shown. Ranks read it as a
    tuned lens whose maps are J h, without a bias.
    """

    vocabulary: int = 0  # rows of the output matrix in its file; 0: it has none, and no edits
    fit: JacobianRecord | None = None  # null: its folder does not state it


JACOBIAN_LENSES = ArtifactKind(
    plural="jacobians",
    short="jacobian",
    noun="Jacobian lens",
    record=JacobianLens,
    request=JacobianLensRequest,
    takes="Jacobian lenses. `path` is a folder below `lenses` in `artifacts_dir` with "
    "`lens.safetensors`, as fits write it and `midstream convert` makes it of other tools' files.",
    make="midstream.api.routes.registered:make_jacobian",
    calls="midstream.client.sdk.registered:Jacobians",
    limit=MAX_TUNED,
)
