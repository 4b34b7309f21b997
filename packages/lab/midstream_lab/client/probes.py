"""Linear probes from captured rows: `fit` trains one with scikit-learn, and evaluates it on
held-out rows.
"""

import importlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from midstream.client.extras import need
from midstream.schemas.artifacts.probes import HeldOut, Roc, ScoreHistogram
from midstream.schemas.base.errors import Excluded, Translated, check_excluded, invalid
from midstream.schemas.base.limits import MAX_PROBE_BINS
from midstream.schemas.base.records import Plotted

#: The most iterations of the solver; on standardised rows it converges long before.
_ITERATIONS = 2000
#: Shuffles of the labels for the baseline.
_SHUFFLES = 5
#: Two classes, in any letters, of which the second is the positive one.
_PAIRS = (("0", "1"), ("-1", "1"), ("false", "true"), ("no", "yes"), ("negative", "positive"))
#: The fewest rows of a class: two to train on, and two held out.
LEAST = 4
#: The quantiles of the scores between which a histogram has its bins, and the fewest of these.
_RANGE = (0.01, 0.99)
_BINS = 16


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

    Scores are log-odds. Two classes have a single score, that of the positive class; several
    classes have a logit each.
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

    def fields(self, labels: Any = None) -> dict[str, Any]:
        """Return the fields of `PUT /v1/artifacts/probes/{name}` that are known. Raises
        MidstreamError for `labels` that it cannot be registered with.
        """
        check_labels(labels, [*self.metrics.train])
        names = ("weight", "bias", "labels", "thresholds", "layer", "hook", "held_out")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def __repr__(self) -> str:
        site = "" if self.layer is None else f", {self.hook or 'post_block'} {self.layer}"
        shown = f"accuracy={self.metrics.accuracy:.3f}, auroc={self.metrics.auroc:.3f}"
        return f"Fit(labels={self.labels}{site}, {shown})"

    def scores(self, rows: np.ndarray) -> np.ndarray:
        """Return the scores `[n, k]` of `rows` `[n, hidden]`, as the ranks compute them."""
        result: np.ndarray = np.asarray(rows, dtype=np.float32) @ self.weight.T + self.bias
        return result


def fit(
    rows: np.ndarray,
    labels: Sequence[Any],
    *,
    positive: Any = None,
    groups: Sequence[Any] | None = None,
    held_out: float = 0.25,
    strength: float = 1.0,
    seed: int = 0,
    layer: int | None = None,
    hook: str | None = None,
) -> Fit:
    """Fit a logistic regression of `labels` on standardised `rows` `[n, hidden]`; the scaling is
    folded into weight and bias.

    `positive`: which of two classes has the high scores; required unless they are named so that
    they say it: 0 and 1, -1 and 1, false and true, no and yes, or negative and positive.
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
    rows = np.asarray(rows, dtype=np.float64)
    names = np.array([str(label) for label in labels])
    wrong = int((~np.isfinite(rows)).sum())
    check_excluded(
        (
            Excluded(
                "rows",
                rows.ndim != 2 or len(rows) != len(names),
                f"has shape {list(rows.shape)} for {len(names)} labels",
                "[labels, hidden]",
            ),
            Excluded("rows", wrong, f"has values that are not finite ({wrong} of {rows.size})"),
            Excluded(
                "held_out",
                not 0 < held_out < 1,
                f"is {held_out}",
                "a share between 0 and 1, both excluded",
            ),
        )
    )
    classes = classes_of(labels, positive)
    train, test = _split(names, groups, held_out, seed)
    counts = {
        side: {name: int((names[chosen] == name).sum()) for name in classes}
        for side, chosen in (("train", train), ("held_out", test))
    }
    for side, of_side in counts.items():
        for name, count in of_side.items():
            if count < 2:
                raise invalid(
                    "labels",
                    f"class {name!r} has {count} rows in {side}",
                    allowed="two or more in both train and held_out",
                )
    numbers = np.array([classes.index(name) for name in names])
    weight, bias = _train(rows[train], numbers[train], strength)
    scores = rows[test] @ weight.T + bias
    accuracy, auroc = _evaluate(scores, numbers[test])
    generator = np.random.default_rng(seed)
    shuffled = [
        _evaluate(rows[test] @ chance.T + offset, numbers[test])
        for chance, offset in (
            _train(rows[train], generator.permutation(numbers[train]), strength)
            for _ in range(_SHUFFLES)
        )
    ]
    of_scores = _scored(classes)
    most = max(classes, key=counts["train"].__getitem__)
    metrics = Metrics(
        accuracy=accuracy,
        auroc=auroc,
        baseline_accuracy=float(np.mean([item for item, _ in shuffled])),
        baseline_auroc=float(np.mean([item for _, item in shuffled])),
        majority=counts["held_out"][most] / len(test),
        **counts,
    )
    thresholds = [0.0] * len(of_scores)
    if len(classes) == 2:
        thresholds = [_threshold(rows[train] @ weight[0] + bias[0], names[train] == classes[1])]
    return Fit(
        weight=weight.astype(np.float32),
        bias=bias.astype(np.float32),
        labels=of_scores,
        thresholds=thresholds,
        metrics=metrics,
        held_out=[
            _held_out(column, names[test] == name, threshold)
            for column, name, threshold in zip(scores.T, of_scores, thresholds, strict=True)
        ],
        layer=layer,
        hook=hook,
    )


def classes_of(
    labels: Sequence[Any], positive: Any = None, field: str = "labels", least: int = LEAST
) -> list[str]:
    """Return the classes in ascending order, False before True, 0 before 1; of two, the positive
    one is the second. Raises MidstreamError if nothing says which that is, or naming `field` for
    fewer than two classes, or a class with fewer than `least` rows.
    """
    given = labels.tolist() if isinstance(labels, np.ndarray) else labels
    counts = Counter(map(str, sorted(given, key=_place)))
    names = [*counts]
    rows = sum(counts.values())
    rarest = min(names, key=counts.__getitem__, default="")
    found = f"has {len(names)} classes in {rows} rows, {rarest!r} in {counts[rarest]}"
    each = f"is for two classes: {field} has {len(names)}, which have a score each"
    check_excluded(
        (
            Excluded(field, len(names) < 2, f"has {len(names)} classes", "two or more"),
            Excluded(field, counts[rarest] < least, found, f"{least} or more rows of each class"),
            Excluded("positive", positive is not None and len(names) > 2, each),
        )
    )
    return _ordered(names, positive) if len(names) == 2 else names


def _place(label: Any) -> tuple[bool, Any]:
    """Return the sort key of a class: numbers first, then other classes by their names."""
    number = isinstance(label, int | float)
    return not number, label if number else str(label)


def _ordered(classes: Sequence[str], positive: Any) -> list[str]:
    """Return two classes, the positive one second. Raises MidstreamError naming `positive`."""
    by_word = {name.casefold().removesuffix(".0"): name for name in classes}
    pair = next((pair for pair in _PAIRS if by_word.keys() == {*pair}), ())
    words = pair[1:] if positive is None else (str(positive), str(positive).casefold())
    by_word |= {name: name for name in classes}
    chosen = next((by_word[word] for word in words if word in by_word), None)
    if chosen is None:
        found = "is required" if positive is None else f"is {positive!r}"
        raise invalid(
            "positive",
            f"{found}: the classes are {' and '.join(map(repr, classes))}",
            allowed=", ".join(classes),
            hint="name the class that has the high scores",
        )
    return [*(name for name in classes if name != chosen), chosen]


def _scored(classes: list[str]) -> list[str]:
    """Return the class of each score."""
    return classes[1:] if len(classes) == 2 else classes


def check_labels(labels: Any, classes: list[str]) -> None:
    """Raise MidstreamError for a label that is the name of another class than its score's."""
    given = labels if isinstance(labels, list | tuple | np.ndarray) else [labels]
    for label, own in zip(given, _scored(classes), strict=False):
        if label is not None and str(label) != own and str(label) in classes:
            raise invalid(
                "labels",
                f"{label!r} is another class than the one with this score, {own!r}",
                hint=f"positive={label!r} in the fit gives it the score"
                if len(classes) == 2
                else None,
            )


def _split(
    names: np.ndarray, groups: Sequence[Any] | None, held_out: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of training and held-out rows; each class has the same share of both."""
    selection = importlib.import_module("sklearn.model_selection")
    members = [*range(len(names))] if groups is None else [str(group) for group in groups]
    if len(members) != len(names):
        raise invalid(
            "groups", f"has {len(members)} entries", allowed=f"{len(names)}, one for each row"
        )
    parts = max(2, round(1 / held_out))
    field, allowed = ("labels", None) if groups is None else ("groups", f"{parts} or more groups")
    splitter = (
        selection.StratifiedShuffleSplit(n_splits=1, test_size=held_out, random_state=seed)
        if groups is None
        else selection.StratifiedGroupKFold(n_splits=parts, shuffle=True, random_state=seed)
    )
    with Translated(ValueError, lambda error: invalid(field, str(error), allowed=allowed)):
        sides: tuple[np.ndarray, np.ndarray] = next(
            splitter.split(names, names, None if groups is None else members)
        )
        return sides


def _train(rows: np.ndarray, numbers: np.ndarray, strength: float) -> tuple[np.ndarray, np.ndarray]:
    """Train a classifier; return weight `[k, hidden]` and bias `[k]` for rows that are not
    standardised. `numbers`: the class of each row.
    """
    linear = importlib.import_module("sklearn.linear_model")
    mean = rows.mean(axis=0)
    scale = rows.std(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    model = linear.LogisticRegression(C=strength, max_iter=_ITERATIONS)
    model.fit((rows - mean) / scale, numbers)
    weight = model.coef_ / scale
    return weight, model.intercept_ - weight @ mean


def _evaluate(scores: np.ndarray, numbers: np.ndarray) -> tuple[float, float]:
    """Return accuracy and AUROC. `numbers`: the class of each row."""
    metrics = importlib.import_module("sklearn.metrics")
    first = 1 if scores.shape[1] == 1 else 0  # of two classes, the second has the score
    answers = scores[:, 0] > 0 if first else scores.argmax(axis=1)
    aurocs = [
        metrics.roc_auc_score(numbers == first + number, column)
        for number, column in enumerate(scores.T)
    ]
    return float((answers == numbers).mean()), float(np.mean(aurocs))


def _held_out(scores: np.ndarray, positive: np.ndarray, threshold: float) -> HeldOut:
    """Return the ROC curve, at most `MAX_PROBE_BINS` of its points, and the histogram of both
    classes, whose first and last bin have what is beyond them; no bin straddles the threshold.
    """
    metrics = importlib.import_module("sklearn.metrics")
    fpr, tpr, _ = metrics.roc_curve(positive, scores)
    kept = np.unique(np.linspace(0, len(fpr) - 1, MAX_PROBE_BINS).round().astype(int))
    inside = np.clip(scores, *np.quantile(scores, _RANGE))
    bins = max(_BINS, len(np.histogram_bin_edges(inside, "auto")) - 1)
    grid = np.histogram_bin_edges(inside, min(bins, MAX_PROBE_BINS - 4))
    width = grid[1] - grid[0]
    first, last = (grid[[0, -1]] - threshold) / width
    edges = threshold + width * np.arange(np.floor(first) - 1, np.ceil(last) + 2)
    negative, positives = (
        np.histogram(np.clip(scores[side], edges[0], edges[-1]), edges)[0].tolist()
        for side in (~positive, positive)
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
    sorted_scores = scores[order]
    hits = positive[order].astype(np.int64)
    # right[i]: rows classified correctly if the i lowest scores are called negative
    right = np.cumsum([hits.sum(), *(1 - 2 * hits)])
    middles = np.concatenate(
        [
            [sorted_scores[0] - 1],
            (sorted_scores[1:] + sorted_scores[:-1]) / 2,
            [sorted_scores[-1] + 1],
        ]
    )
    best = np.flatnonzero(right == right.max())
    return float(middles[best[len(best) // 2]])
