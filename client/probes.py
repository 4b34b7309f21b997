"""Linear probes from captured rows: `fit` trains one with scikit-learn, and evaluates it on
held-out rows.
"""

import importlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..schemas.artifacts.probes import HeldOut, Roc, ScoreHistogram
from ..schemas.base import Plotted, Translated, invalid
from ..schemas.base.limits import MAX_PROBE_BINS
from .extras import need

#: The most iterations of the solver; on standardised rows it converges long before.
_ITERATIONS = 2000
#: Shuffles of the labels for the baseline.
_SHUFFLES = 5
#: The quantiles of the scores between which a histogram has its bins.
_RANGE = (0.01, 0.99)


@dataclass(frozen=True)
class Metrics:
    """Metrics on the held-out rows.

    `baseline_…`: the mean over several probes trained in the same way on shuffled labels.
    """

    accuracy: float
    auroc: float  # for several classes, the mean over one-against-the-rest AUROCs
    baseline_accuracy: float
    baseline_auroc: float
    majority: float  # accuracy of always answering the most frequent class
    train: dict[str, int]  # class → rows
    held_out: dict[str, int]


@dataclass(frozen=True)
class Fit(Plotted):
    """A trained probe.

    Scores are log-odds. Two classes have a single score, that of the second; several classes have a
    logit each.
    """

    weight: np.ndarray  # float32 `[k, hidden]`
    bias: np.ndarray  # float32 `[k]`
    labels: list[str]  # the class of each score
    # with two classes, the threshold with the best accuracy on the training rows; otherwise 0
    thresholds: list[float]
    metrics: Metrics
    held_out: list[HeldOut]  # for each label
    layer: int | None = None  # the site of the rows, if known
    hook: str | None = None

    def fields(self) -> dict[str, Any]:
        """Return the fields of `PUT /v1/artifacts/probes/{name}` that are known."""
        names = ("weight", "bias", "labels", "thresholds", "layer", "hook", "held_out")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def __repr__(self) -> str:
        site = "" if self.layer is None else f", {self.hook or 'post_block'} {self.layer}"
        shown = f"accuracy={self.metrics.accuracy:.3f}, auroc={self.metrics.auroc:.3f}"
        return f"Fit(labels={self.labels}{site}, {shown})"

    def scores(self, rows: np.ndarray) -> np.ndarray:
        """Return the scores `[n, k]` of `rows` `[n, hidden]`, as the ranks compute them."""
        scores: np.ndarray = np.asarray(rows, dtype=np.float32) @ self.weight.T + self.bias
        return scores


def fit(
    rows: np.ndarray,
    labels: Sequence[Any],
    *,
    groups: Sequence[Any] | None = None,
    held_out: float = 0.25,
    strength: float = 1.0,
    seed: int = 0,
    layer: int | None = None,
    hook: str | None = None,
) -> Fit:
    """Fit a logistic regression of `labels` on standardised `rows` `[n, hidden]`; the scaling is
    folded into weight and bias.

    `held_out`: the share of rows, equal for all classes, that is used only for the metrics.
    `groups`: the group of each row, such as its prompt; no group is split between training and
    held-out rows. `strength`: scikit-learn's C. `layer`, `hook`: the site of the rows, which the
    probe is registered for; rows of `client.captures.matrix` know it. Raises MidstreamError for
    rows that are not finite, and for a class with fewer than two training or held-out rows;
    MissingExtraError without scikit-learn.
    """
    need("probes", "fitting a probe")
    layer = getattr(rows, "layer", None) if layer is None else layer
    hook = hook or getattr(rows, "hook", None)
    rows, names = np.asarray(rows, dtype=np.float64), np.array([str(label) for label in labels])
    if rows.ndim != 2 or len(rows) != len(names):
        raise invalid(
            "rows",
            f"has shape {list(rows.shape)} for {len(names)} labels",
            allowed="[labels, hidden]",
        )
    if not np.isfinite(rows).all():
        raise invalid(
            "rows",
            (f"has values that are not finite ({int((~np.isfinite(rows)).sum())} of {rows.size})"),
        )
    if not 0 < held_out < 1:
        raise invalid(
            "held_out", f"is {held_out}", allowed="a share between 0 and 1, both excluded"
        )
    classes = _classes(labels)
    if len(classes) < 2:
        raise invalid("labels", f"has {len(classes)} classes", allowed="two or more")
    train, test = _split(names, groups, held_out, seed)
    for side, chosen in (("train", train), ("held_out", test)):
        count = Counter(names[chosen].tolist())
        if few := [name for name in classes if count[name] < 2]:
            raise invalid(
                "labels",
                f"class {few[0]!r} has {count[few[0]]} rows in {side}",
                allowed="two or more in both train and held_out",
            )
    weight, bias = _train(rows[train], names[train], classes, strength)
    scores = rows[test] @ weight.T + bias
    accuracy, auroc = _evaluate(scores, names[test], classes)
    generator = np.random.default_rng(seed)
    shuffled = []
    for _ in range(_SHUFFLES):
        weight_, bias_ = _train(rows[train], generator.permutation(names[train]), classes, strength)
        shuffled.append(_evaluate(rows[test] @ weight_.T + bias_, names[test], classes))
    two = len(classes) == 2
    of_scores = classes[1:] if two else classes
    counts = Counter(names[test].tolist())
    metrics = Metrics(
        accuracy=accuracy,
        auroc=auroc,
        baseline_accuracy=float(np.mean([item for item, _ in shuffled])),
        baseline_auroc=float(np.mean([item for _, item in shuffled])),
        majority=counts[Counter(names[train].tolist()).most_common(1)[0][0]] / len(test),
        train={name: int((names[train] == name).sum()) for name in classes},
        held_out={name: counts[name] for name in classes},
    )
    return Fit(
        weight=weight.astype(np.float32),
        bias=bias.astype(np.float32),
        labels=of_scores,
        thresholds=[_threshold(rows[train] @ weight[0] + bias[0], names[train] == classes[1])]
        if two
        else [0.0] * len(classes),
        metrics=metrics,
        held_out=[
            _held_out(column, names[test] == name)
            for column, name in zip(scores.T, of_scores, strict=True)
        ],
        layer=layer,
        hook=hook,
    )


def _classes(labels: Sequence[Any]) -> list[str]:
    """Return the classes in ascending order: False before True, 0 before 1."""
    distinct = set(labels.tolist() if isinstance(labels, np.ndarray) else labels)
    try:
        ordered = sorted(distinct)
    except TypeError:
        ordered = sorted(distinct, key=str)
    return [str(item) for item in ordered]


def _split(
    names: np.ndarray, groups: Sequence[Any] | None, held_out: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of training and held-out rows; each class has the same share of both."""
    selection = importlib.import_module("sklearn.model_selection")
    if groups is None:
        splitter = selection.StratifiedShuffleSplit(
            n_splits=1, test_size=held_out, random_state=seed
        )
        with Translated(ValueError, lambda error: invalid("labels", str(error))):
            return next(splitter.split(names, names))  # type: ignore[no-any-return]
    if len(groups) != len(names):
        raise invalid(
            "groups", f"has {len(groups)} entries", allowed=f"{len(names)}, one for each row"
        )
    parts = max(2, round(1 / held_out))
    splitter = selection.StratifiedGroupKFold(n_splits=parts, shuffle=True, random_state=seed)
    labels = np.array([str(group) for group in groups])
    with Translated(
        ValueError, lambda error: invalid("groups", str(error), allowed=f"{parts} or more groups")
    ):
        return next(splitter.split(names, names, labels))  # type: ignore[no-any-return]


def _train(
    rows: np.ndarray, names: np.ndarray, classes: Sequence[str], strength: float
) -> tuple[np.ndarray, np.ndarray]:
    """Train a classifier; return weight `[k, hidden]` and bias `[k]` for rows that are not
    standardised.
    """
    linear = importlib.import_module("sklearn.linear_model")
    mean, scale = rows.mean(axis=0), rows.std(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    model = linear.LogisticRegression(C=strength, max_iter=_ITERATIONS).fit(
        (rows - mean) / scale, np.array([classes.index(name) for name in names])
    )
    weight = model.coef_ / scale
    return weight, model.intercept_ - weight @ mean


def _evaluate(scores: np.ndarray, names: np.ndarray, classes: Sequence[str]) -> tuple[float, float]:
    """Return accuracy and AUROC."""
    metrics = importlib.import_module("sklearn.metrics")
    numbers = np.array([classes.index(name) for name in names])
    if len(classes) == 2:
        return float(((scores[:, 0] > 0) == (numbers == 1)).mean()), float(
            metrics.roc_auc_score(numbers == 1, scores[:, 0])
        )
    aurocs = [
        float(metrics.roc_auc_score(numbers == number, scores[:, number]))
        for number in range(len(classes))
    ]
    return float((scores.argmax(axis=1) == numbers).mean()), float(np.mean(aurocs))


def _held_out(scores: np.ndarray, positive: np.ndarray) -> HeldOut:
    """Return the ROC curve, at most `MAX_PROBE_BINS` of its points, and the histogram of both
    classes, whose first and last bin have what is beyond them.
    """
    metrics = importlib.import_module("sklearn.metrics")
    fpr, tpr, _ = metrics.roc_curve(positive, scores)
    kept = np.unique(np.linspace(0, len(fpr) - 1, MAX_PROBE_BINS).round().astype(int))
    inside = np.clip(scores, *np.quantile(scores, _RANGE))
    edges = np.histogram_bin_edges(inside, "auto")
    if len(edges) > MAX_PROBE_BINS + 1:
        edges = np.histogram_bin_edges(inside, MAX_PROBE_BINS)
    negative, positives = (
        np.histogram(inside[side], edges)[0].tolist() for side in (~positive, positive)
    )
    return HeldOut(
        roc=Roc(
            fpr=fpr[kept].tolist(),
            tpr=tpr[kept].tolist(),
            auc=float(metrics.roc_auc_score(positive, scores)),
        ),
        histogram=ScoreHistogram(edges=edges.tolist(), negative=negative, positive=positives),
    )


def _threshold(scores: np.ndarray, positive: np.ndarray) -> float:
    """Return the midpoint between two neighbouring scores that separates the classes best."""
    order = np.argsort(scores)
    sorted_scores, hits = scores[order], positive[order].astype(np.int64)
    # right[i]: rows classified correctly if the i lowest scores are called negative
    right = (
        np.concatenate([[0], np.cumsum(1 - hits)])
        + hits.sum()
        - np.concatenate([[0], np.cumsum(hits)])
    )
    middles = np.concatenate(
        [
            [sorted_scores[0] - 1],
            (sorted_scores[1:] + sorted_scores[:-1]) / 2,
            [sorted_scores[-1] + 1],
        ]
    )
    best = np.flatnonzero(right == right.max())
    return float(middles[best[len(best) // 2]])
