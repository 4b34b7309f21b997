"""A sweep's result, and the answers of a server that has it, made by hand."""

from typing import Any

from http_kit import Reply, reply
from job_kit import job_result, job_view

from midstream_lab.records.sweeps import (
    Baseline,
    PairResult,
    PatchWindow,
    Skipped,
    SweepResult,
    SweepSummary,
)

CLEAN = ["The", " E", "iffel", " Tower", " is", " in"]
CORRUPT = ["The", " Col", "osse", "um", " is", " in"]
LAYERS = list(range(30))
#: Column 0 is skipped everywhere; the cell at layer 9, column 2 failed.
SKIPPED_COLUMN = 0
FAILED = (9, 2)
#: The strongest cell of `pre_attn`: layer, column.
PEAK = (11, 3)


def grid(
    peak: float, layers: int = len(LAYERS), columns: int = len(CORRUPT)
) -> list[list[float | None]]:
    """Falls off around `PEAK`."""

    def value(layer: int, column: int) -> float | None:
        if column == SKIPPED_COLUMN or (layer, column) == FAILED:
            return None
        return peak / (1 + abs(layer - PEAK[0]) + 2 * abs(column - PEAK[1]))

    return [[value(layer, column) for column in range(columns)] for layer in range(layers)]


def pair(**given: Any) -> PairResult:
    fields: dict[str, Any] = {
        "labels": CORRUPT,
        "base_tokens": CORRUPT,
        "source_tokens": CLEAN,
        "answer": " Paris",
        "foil": " Rome",
        "base": Baseline(value=-9.0, logprob=-9.4, foil_logprob=-0.4),
        "source": Baseline(value=4.8, logprob=-0.4, foil_logprob=-5.2),
        "noise_floor": 0.004,
        "grids": {"pre_attn": grid(0.95), "mlp_out": grid(-0.2)},
        "notes": ["position 3: aligned from the end"],
        "positions": [[], [1], [2], [3], [4], [5]],
    }
    return PairResult(**fields | given)


def result(*pairs: PairResult, **given: Any) -> SweepResult:
    whole = list(pairs or [pair()])
    skipped = [
        Skipped(
            pair=number,
            hook=hook,
            layers=LAYERS,
            column=SKIPPED_COLUMN,
            reason="the first tokens are the same",
        )
        for number in range(len(whole))
        for hook in ("pre_attn", "mlp_out")
    ]
    skipped += [
        Skipped(
            pair=number, hook=hook, layers=[FAILED[0]], column=FAILED[1], reason="the run is gone"
        )
        for number in range(len(whole))
        for hook in ("pre_attn", "mlp_out")
    ]
    cells = len(whole) * 2 * (len(LAYERS) * (len(CORRUPT) - 1) - 1)
    fields: dict[str, Any] = {
        "metric": "recovered",
        "direction": "denoise",
        "ablation": None,
        "hooks": ["pre_attn", "mlp_out"],
        "layers": LAYERS,
        "window": PatchWindow(),
        "alpha": 1.0,
        "pairs": whole,
        "mean": whole[0].grids,
        "spread": {},
        "skipped": skipped,
    }
    fields |= given
    summary = SweepSummary(
        cells=cells,
        skipped=len(whole) * 2 * (len(LAYERS) + 1),
        total=len(whole) * 2 * len(LAYERS) * len(CORRUPT),
        seconds=2.5,
        metric=fields["metric"],
        base=[-9.0],
        source=[4.8],
        noise_floor=[0.004],
    )
    return SweepResult(**fields, summary=summary)


VIEW = job_view(kind="sweep", version=3)


def over(sweep: SweepResult | None) -> Reply:
    return reply(job_result(sweep=sweep))
