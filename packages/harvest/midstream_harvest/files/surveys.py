"""Results of surveys, read from the harvest's store by ranges.

Tensors, with F features, k examples, w = 2 · context + 1 tokens and one harvest, or two that are
compared: `active` int64 and `mean` float32 `[F, harvests]`; `values` float32, `documents` and
`positions` int64 `[F, k]`; `tokens` int64 and `around` float32 `[F, k, w]`. Absent examples have
document −1, absent tokens id −1.
"""

import numpy as np

from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import Result
from midstream.storage.store import ArtifactStore, open_store

from ..records.harvests import Example, FeatureFigures, HarvestView, SurveyEntry, SurveyView
from .shards import Shard


class Surveyed(Result, Shard):
    """The result of a survey, which `entry` describes."""

    def __init__(self, store: ArtifactStore, entry: SurveyEntry) -> None:
        self.survey = entry
        self._store = store
        self._files = {}

    @classmethod
    def of(cls, view: HarvestView, job: str) -> "Surveyed":
        """Open a finished survey of a harvest by its job. Raises `not_found`."""
        for entry in view.surveys:
            if entry.job == job:
                return cls(open_store(view.uri), entry)
        raise MidstreamError("not_found", f"harvest {view.id} has no survey {job}")

    def __repr__(self) -> str:
        sae = self.survey.survey.sae
        return f"Surveyed(job={self.survey.job!r}, sae={sae and sae.name!r}, rows={len(self)})"

    def __len__(self) -> int:
        return self.survey.rows

    def array(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return rows `[start, stop)` of a tensor (see the module). Raises OSError, DamagedBlob."""
        return self._read(self._open(self.survey.key), name, start, stop)

    @property
    def density(self) -> np.ndarray:
        """The share of the rows where each feature is active: float64 `[features, harvests]`."""
        return self.array("active") / max(1, len(self))

    def features(self, order: str = "density", limit: int = 50) -> list[FeatureFigures]:
        """Return the features with the largest `density` or `mean`, or in a comparison with the
        largest change of it, the mean being that over all rows then.
        """
        figures = {"density": self.density, "mean": self.array("mean")}
        # means are over active rows
        by = figures[order]
        over_all = figures["density"] if order == "mean" else 1.0
        by = abs(np.diff(by * over_all))[:, 0] if by.shape[1] > 1 else by[:, 0]
        return [
            FeatureFigures(
                feature=feature,
                **{name: array[feature].tolist() for name, array in figures.items()},
            )
            for feature in np.argsort(-by, kind="stable")[:limit].tolist()
        ]

    def view(
        self, order: str = "density", limit: int = 50, feature: int | None = None
    ) -> SurveyView:
        """Return features, and figures and examples of `feature`; by default of the first, or the
        examples of a comparison.

        Raises `not_found`.
        """
        listed = self.features(order, limit)
        compared = bool(self.survey.survey.against)
        asked = feature
        if asked is None:
            asked = 0 if compared else listed[0].feature
        return SurveyView(
            survey=self.survey,
            features=listed,
            examples=self.examples(asked),  # first: it raises
            figures=None if compared else self.figures(asked),
        )

    def figures(self, feature: int) -> FeatureFigures:
        """Return the density and mean of a feature that the survey has."""
        active, mean = (self.array(name, feature, feature + 1)[0] for name in ("active", "mean"))
        return FeatureFigures(
            feature=feature, density=(active / max(1, len(self))).tolist(), mean=mean.tolist()
        )

    def examples(self, feature: int = 0) -> list[Example]:
        """Return the strongest examples of a feature; of a comparison, with feature 0, the tokens
        with the largest KL divergence. Raises `not_found`.
        """
        names = ("documents", "positions", "values", "tokens", "around")
        parts = [self.array(name, feature, feature + 1) for name in names]
        if not len(parts[0]):
            raise MidstreamError("not_found", f"the survey has no examples of feature {feature}")
        found = []
        for document, position, value, tokens, around in zip(
            *(part[0] for part in parts), strict=True
        ):
            near = np.flatnonzero(tokens >= 0)
            if document < 0 or not len(near):
                continue
            found.append(
                Example(
                    document=int(document),
                    position=int(position),
                    value=float(value),
                    positions=(position - self.survey.survey.context + near).tolist(),
                    token_ids=tokens[near].tolist(),
                    values=around[near].tolist(),
                )
            )
        return found
