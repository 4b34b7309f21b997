"""Keyword arguments of the calls of this package, like `midstream.client.sdk.fields`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from midstream.client.sdk.fields import (
    Fields,
    Handled,
    HookInput,
    Numbers,
    OfModel,
    Positions,
    PromptInput,
    Some,
)
from midstream.schemas.requests.trainings import FitMethod

from ..records.estimates import EstimateMethod, Verify
from ..records.fits import FitExample, RegisterWhen
from ..records.sweep_paths import SweepPath
from ..records.sweeps import Ablation, Axis, Direction, Metric, Neurons, PatchWindow, SweepPair


class SweepSites(OfModel, total=False):
    """Says what a sweep patches, and how it measures the effect."""

    hooks: Some[HookInput] | None
    layers: Numbers | None
    positions: Positions | None
    axis: Axis | None
    heads: Numbers | None
    neurons: Neurons | Fields | None
    path: SweepPath | Fields | None
    window: PatchWindow | Fields | None
    metric: Metric | None
    direction: Direction | None
    ablation: Ablation | None
    alignment: str | Sequence[tuple[int, int]] | None
    alpha: float | None
    mask: Numbers | None
    noise: int | None
    lora: str | None


class StudyFields(SweepSites, Handled, total=False):
    """The fields of a sweep without its pairs."""


class SweepFields(StudyFields, total=False):
    """`POST /v1/sweeps`."""

    pairs: Some[SweepPair | Fields]


class AttributionFields(SweepFields, total=False):
    """`POST /v1/attributions`."""

    method: EstimateMethod | None
    steps: int | None
    verify: Verify | Fields | None
    seed: int | None
    sae: str | None
    keep: int | None


class AttributeFields(AttributionFields, total=False):
    """An attribution, and the prompts of its only pair."""

    clean: PromptInput | None
    corrupt: PromptInput | None
    answer: PromptInput | None
    foil: PromptInput | None


class FitOptions(TypedDict, total=False):
    """Choices of all fits."""

    rank: int | None
    seed: int | None
    description: str | None


class FitNamed(Handled, total=False):
    """What a fit learns, and from which model."""

    model: str
    name: str


class ModuleFitOptions(FitOptions, total=False):
    """Choices of the fit of a module."""

    method: FitMethod
    layers: Numbers
    hook: HookInput | None
    read: Positions | None
    positions: Positions | None
    held_out: float | None
    steps: int | None
    batch: int | None
    learning_rate: float | None
    register: RegisterWhen | None


class FitFields(ModuleFitOptions, FitNamed, total=False):
    """`POST /v1/modules/fit`."""

    positive: Sequence[PromptInput] | None
    negative: Sequence[PromptInput] | None
    examples: Sequence[FitExample | Fields] | None


class LensFitOptions(FitOptions, total=False):
    """Choices of the fit of a Jacobian lens."""

    folder: str | None
    layers: Numbers | None
    skip_first: int | None
    max_tokens: int | None


class LensFitFields(LensFitOptions, FitNamed, total=False):
    """`POST /v1/jacobians/fit`."""

    prompts: Sequence[PromptInput]
