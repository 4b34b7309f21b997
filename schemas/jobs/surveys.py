"""Surveys of harvests: where each feature of an autoencoder is active, and how far two harvests of
the same tokens differ.

docs/decisions/0047-features.md explains the design.
"""

from typing import Annotated, Literal

import msgspec

from ..access.handling import Handling
from ..base.limits import MAX_EXAMPLE_CONTEXT, MAX_EXAMPLES, Index, Metadata, Name
from ..base.records import Record

SURVEY_FORMAT = "midstream-survey-1"
#: Bytes of one example, and of one token of its context.
EXAMPLE_BYTES, CONTEXT_BYTES = 20, 12
#: Bytes of the figures of one feature.
FEATURE_BYTES = 16

#: The figure that a listing of features is ordered by; the largest come first.
SurveyOrder = Literal["density", "largest", "mean", "density_change", "mean_change"]


class SurveyRequest(Handling, kw_only=True):
    """The examples that a survey keeps."""

    # of each feature, of different documents
    top: Annotated[int, msgspec.Meta(ge=1, le=MAX_EXAMPLES)] = 10
    # tokens before and after each example
    context: Annotated[int, msgspec.Meta(ge=0, le=MAX_EXAMPLE_CONTEXT)] = 8
    metadata: Metadata = {}


class FeatureSurveyRequest(SurveyRequest, kw_only=True):
    """Body of `POST /v1/harvests/{id}/features`."""

    sae: Name


class ComparisonRequest(SurveyRequest, kw_only=True):
    """Body of `POST /v1/harvests/{id}/compare`."""

    against: Name  # another harvest of the same tokens
    sae: Name | None = None  # also compare its features


class SurveyEntry(Record, omit_defaults=True, kw_only=True):
    """A finished survey."""

    job: str
    harvest: str
    sae: str = ""  # name
    digest: str = ""  # of the autoencoder's files
    hook: str = ""  # that it reads
    layer: int = 0
    features: int = 0
    top: int
    context: int
    against: str = ""
    rows: int  # that were read
    non_finite: int = 0  # rows with values that are not finite: no feature is active there
    mean_kl: float | None = None  # in nats, over all rows
    identity: str = ""  # of the model that computed the rows
    manifest: int = 0  # CRC32 of the harvest's manifest
    key: str  # of the file in the harvest's store
    bytes: int
    crc32: int


class SurveyList(Record, kw_only=True):
    """Answer of `GET /v1/harvests/{id}/surveys`."""

    surveys: list[SurveyEntry]


class FeatureFigures(Record, omit_defaults=True, kw_only=True):
    """Figures of one feature over all rows of a harvest."""

    feature: int
    density: float  # share of the rows where it is active
    largest: float
    mean: float  # over the rows where it is active
    other: "FeatureFigures | None" = None  # the same in the harvest that is compared


class FeatureListing(Record, kw_only=True):
    """Answer of `GET /v1/harvests/{id}/surveys/{job}`."""

    survey: SurveyEntry
    features: list[FeatureFigures]


class Example(Record, kw_only=True):
    """A token where a feature is strongly active, or where two predictions are far apart, with its
    neighbours in the document that have rows.
    """

    document: int
    position: int
    value: float  # activation; in a comparison KL divergence, in nats
    positions: list[Index]  # of the context, with the token itself
    token_ids: list[int]
    values: list[float]


class ExampleList(Record, kw_only=True):
    """Answer of `GET /v1/harvests/{id}/surveys/{job}/examples`, the strongest first."""

    figures: FeatureFigures | None  # None in a comparison
    examples: list[Example]
