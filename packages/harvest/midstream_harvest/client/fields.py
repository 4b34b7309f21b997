"""Keyword arguments of the calls on harvests, for editors and type checkers; as
`midstream.client.sdk.fields`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypedDict

from midstream.client.sdk.fields import Fields, Handled, HookInput, Numbers, Some, Steering
from midstream.schemas.access.handling import Priority
from midstream.schemas.jobs.jobs import Sampling
from midstream.schemas.prompts.sites import At

from ..records.harvests import (
    HarvestCut,
    HarvestPositions,
    HarvestShards,
    HarvestSource,
    HarvestStream,
)


class HarvestFields(TypedDict, total=False):
    """`POST /v1/harvests`."""

    model: str
    source: HarvestSource | Fields
    layers: Numbers | None
    hook: HookInput | None
    hooks: Some[HookInput] | Fields | None
    cut: HarvestCut | Fields | None
    positions: HarvestPositions | Fields | None
    at: At | None
    generate: Sampling | Fields | None
    steering: Some[Steering] | None
    lora: str | None
    dtype: str | None
    shards: HarvestShards | Fields | None
    to: HarvestStream | Fields | Literal["store", "stream"] | None
    store: str | None
    max_tokens: int | None
    priority: Priority | None
    metadata: Mapping[str, str] | None


class SurveyFields(Handled, total=False):
    """`POST /v1/harvests/{id}/surveys`."""

    sae: str | None
    against: str | None
    top: int | None
    context: int | None
