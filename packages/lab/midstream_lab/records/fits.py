"""Fits: jobs that learn a module, or a lens, from examples on the model's gradient worker.

The API resolves a `FitRequest` to a `StoredModuleFit`; the worker computes a `FitResult`.
"""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Literal

import msgspec

from midstream.schemas.access.handling import Handling
from midstream.schemas.artifacts.jacobian_lenses import (
    MAX_TOKENS,
    SKIP_FIRST,
    JacobianLens,
    StoredLensFit,
)
from midstream.schemas.base.limits import (
    MAX_DESCRIPTION,
    MAX_FIT_BATCH,
    MAX_FIT_EXAMPLES,
    MAX_FIT_STEPS,
    MAX_INT64,
    MAX_TARGET_TOKENS,
    MAX_TEXT,
    Count,
    Index,
    Metadata,
    Name,
    PathName,
    Text,
    TokenIds,
)
from midstream.schemas.base.records import Record, Result, to_msgpack
from midstream.schemas.jobs.works import Work, WorkFacts
from midstream.schemas.prompts.selectors import (
    Hook,
    HookName,
    LayerSelector,
    PositionSelector,
    PromptPositions,
    RequestedPositions,
)
from midstream.schemas.requests.interventions import MAX_RANK
from midstream.schemas.requests.steering import SteeringTemplate
from midstream.schemas.requests.trainings import BY_GRADIENT, FitMethod, Training

#: When the module is registered. `if_better`: if its effect on held-out examples exceeds the
#: effect's standard error.
RegisterWhen = Literal["if_better", "always", "never"]
Prompts = Annotated[list[Text | TokenIds], msgspec.Meta(max_length=MAX_FIT_EXAMPLES)]


class FitExample(Record):
    """A prompt, and the continuation that the module should make more likely."""

    prompt: Text | TokenIds
    target: (
        Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TEXT)]
        | Annotated[list[Index], msgspec.Meta(min_length=1, max_length=MAX_TARGET_TOKENS)]
    )


class FitRequest(Handling, kw_only=True):
    """Body of `POST /v1/modules/fit`.

    The methods from rows (`difference_of_means`, `pca`, `logistic`) take `positive` and `negative`;
    for `pca`, entries with the same index are a pair. With `examples` too, the effect is measured
    on these. The methods by gradient (`vector`, `reft`) take `examples`.
    """

    model: Name
    name: PathName  # of the module
    method: FitMethod
    layers: LayerSelector  # each gets its own edit
    hook: HookName = "post_block"
    positive: Prompts = []
    negative: Prompts = []
    examples: Annotated[list[FitExample], msgspec.Meta(max_length=MAX_FIT_EXAMPLES)] = []
    # whose rows are read; the mean over several is one row
    read: PromptPositions = "last_prompt"
    positions: RequestedPositions = "all"  # that the module edits, also while it is trained
    held_out: Annotated[float, msgspec.Meta(ge=0.05, le=0.5)] = 0.25  # share of the examples
    seed: Annotated[int, msgspec.Meta(ge=0, le=MAX_INT64)] = 0
    rank: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANK)] = 4  # of `reft`
    steps: Annotated[int, msgspec.Meta(ge=1, le=MAX_FIT_STEPS)] = 200  # at most
    batch: Annotated[int, msgspec.Meta(ge=1, le=MAX_FIT_BATCH)] = 8  # examples of one step
    # of Adam: the most that one step changes a row, about, as a share of the row's norm
    learning_rate: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.01
    register: RegisterWhen = "if_better"  # than nothing, on the held-out examples
    description: Annotated[str, msgspec.Meta(max_length=MAX_DESCRIPTION)] = ""
    metadata: Metadata = {}


class LensFitRequest(Handling, kw_only=True):
    """Body of `POST /v1/jacobians/fit`: a corpus, and the fields of `JacobianFit`."""

    model: Name
    name: PathName
    prompts: Prompts  # texts or token ids; each counts the same
    folder: PathName | None = None  # below `artifacts_dir/lenses`; null: the lens's name
    layers: LayerSelector = "all"
    rank: Count | None = None
    seed: Index = 0
    skip_first: Index = SKIP_FIRST
    max_tokens: Count = MAX_TOKENS
    description: Annotated[str, msgspec.Meta(max_length=MAX_DESCRIPTION)] = ""
    metadata: Metadata = {}


class FitTokens(Record):
    """A tokenised example; `at`: the positions that are read or edited."""

    token_ids: Sequence[int]  # with the target's
    prompt_tokens: int
    at: PositionSelector


class StoredModuleFit(Record, tag="module"):
    """A fit of a module after validation."""

    request: FitRequest  # without its prompts and examples
    template: SteeringTemplate  # of the module's entries, without tensors
    positive: list[FitTokens] = []
    negative: list[FitTokens] = []
    examples: list[FitTokens] = []

    @property
    def title(self) -> str:
        """Return the text by which people recognise the job."""
        return f"{self.request.name}: {self.request.method}"

    @property
    def hook(self) -> Hook:
        return self.template.hook

    @property
    def layers(self) -> list[int]:
        return self.template.layers

    @property
    def every(self) -> list[FitTokens]:
        return [*self.positive, *self.negative, *self.examples]

    @property
    def tokens(self) -> int:
        """Return an estimate of the tokens that it computes; a gradient counts as two passes."""
        total = sum(len(example.token_ids) for example in self.every)
        request = self.request
        steps = request.steps if request.method in BY_GRADIENT else 0
        return 2 * total + 3 * steps * request.batch * total // max(1, len(self.examples))

    @property
    def digest(self) -> str:
        """Return the SHA-256, in hexadecimal, of the examples."""
        return hashlib.sha256(to_msgpack((self.positive, self.negative, self.examples))).hexdigest()


#: What a job of kind `fit` computes.
StoredFit = StoredModuleFit | StoredLensFit


class LensProgress(Record):
    """Data of an event `fit` of a lens: the prompts that are done, of those of its corpus."""

    prompts: int
    of: int


class LensFitResult(Result, Record, tag="jacobian_lens"):
    """The outcome of the fit of a lens, which is registered. `lens.fit` has the prompts used, and
    the error of each layer of a sketch.
    """

    lens: JacobianLens


class FitResult(Result, Record, tag="module"):
    """The outcome of the fit of a module. A module that is not registered is not stored."""

    name: str
    training: Training
    digest: str = ""  # of the registered module; empty: it was not registered
    reason: str = ""  # why not


#: Result of a job of kind `fit`.
FitOutcome = FitResult | LensFitResult


class FitWork(Work, tag="fit"):
    """A fit of a module or a lens."""

    fit: StoredFit

    @cached_property
    def facts(self) -> WorkFacts:
        return WorkFacts(title=self.fit.title, tokens=self.fit.tokens)
