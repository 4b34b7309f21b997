"""The rows that patch one feature of an autoencoder, beside arithmetic written by hand with
sae-lens' own activations, and how they are sent in batches.
"""

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusal_kit import refuses
from run_kit import run
from sae_rows import FORMS, ROOT
from safetensors.numpy import load_file

from midstream.schemas.artifacts.saes import StoredSae
from midstream.schemas.base.tensors import to_numpy
from midstream.schemas.settings.settings import Settings, load_settings
from midstream.schemas.settings.tuning import Tuning
from midstream.storage.formats.sae_files import reading
from midstream_lab.gradients.engine import TransformersEngine
from midstream_lab.records.estimates import StoredAttribution, Verify
from midstream_lab.records.sweeps import Column, StoredPair, StoredSweep, Unit
from midstream_lab.run import features as sweep_features
from midstream_lab.run.features import FeatureRows

#: Sums of 8 or 32 numbers of size 1, in another order.
TOLERANCE = {"atol": 2e-6, "rtol": 2e-6}
#: Positions of both prompts; a row has one token, and two together.
PLACES = [[(2, 7)], [(3, 8), (4, 6)]]


def sae(form: str, **changes: Any) -> StoredSae:
    with reading(ROOT / form) as (content, _):
        known = {"name": form, "digest": content.digest, "path": form, "bytes": 1}
    return StoredSae(hook="post_block", layer=1, **known | changes)


def sweep(stored: StoredSae, ablation: Any = None) -> StoredSweep:
    columns = [Column(label=str(number), places=places) for number, places in enumerate(PLACES)]
    return StoredSweep(
        pairs=[StoredPair(base=[1] * 5, source=[1] * 9, columns=columns)],
        hooks=["post_block"],
        layers=[1],
        metric="logit_diff",
        direction="denoise",
        ablation=ablation,
        attribution=StoredAttribution(
            method="attribution", steps=1, seed=0, keep=9, verify=Verify(doubtful=0), sae=stored
        ),
    )


def rows_of(
    folder: Path, asked: StoredSweep, units: list[Unit], **settings: Any
) -> dict[int, list[np.ndarray]]:
    """The rows that the units write, where the first prompt's rows are the first three known."""
    with np.load(ROOT / "rows.npz") as arrays:
        rows = arrays["rows"]
    site = "post_block", 1
    base = run(folder, "base", rows[:3], [2, 3, 4], site)
    source = run(folder, "source", rows[3:6], [6, 7, 8], site)
    chosen = load_settings(
        {}, artifact_store=str(folder), artifacts_dir=str(ROOT.parent), **settings
    )
    found = FeatureRows(chosen, asked).rows(base, None if asked.ablation else source, units)
    return {number: [to_numpy(row) for row in written] for number, written in found.items()}


def units(*asked: tuple[int, int]) -> list[Unit]:
    """Units with these columns and features."""
    return [
        Unit(number, "cell", 0, column=column, feature=feature)
        for number, (column, feature) in enumerate(asked)
    ]


def scale_of(rows: np.ndarray, form: str) -> np.ndarray:
    """What an activation of 1 is in units of each row, `[n, 1]`."""
    if form == "layer_norm":
        return rows.std(1, ddof=1, keepdims=True)
    if form == "constant_norm":
        return np.linalg.norm(rows, axis=1, keepdims=True) / np.sqrt(rows.shape[1])
    return np.ones((len(rows), 1))


@pytest.mark.parametrize("ablation", [None, "zeros", "mean"])
@pytest.mark.parametrize("form", FORMS)
def test_one_feature_is_replaced_and_the_error_is_the_rest(
    tmp_path: Path, form: str, ablation: str | None
) -> None:
    with np.load(ROOT / "rows.npz") as arrays:
        rows = arrays["rows"].astype(np.float64)
        active = arrays[f"{form}.activations"].astype(np.float64)
        decoded = arrays[f"{form}.decoded"].astype(np.float64)
    decoder = load_file(ROOT / form / "sae_weights.safetensors")["W_dec"].astype(np.float64)
    if form == "rescaled":
        decoder /= np.linalg.norm(decoder, axis=1, keepdims=True)
    features = range(decoder.shape[0])
    asked = units(*((column, feature) for column in (0, 1) for feature in (*features, -1)))
    found = rows_of(tmp_path, sweep(sae(form), ablation), asked)
    # index in `rows` of each place: of the patched prompt's row, and of the other's
    for column, pairs in enumerate([[(0, 4)], [(1, 5), (2, 3)]]):
        for place, (to, of) in enumerate(pairs):
            scale = scale_of(rows[[to]], form)[0]
            goal = {None: active[of], "zeros": active[to] * 0, "mean": active[:3].mean(0)}[ablation]
            change = (goal - active[to])[:, None] * decoder * scale
            error = {
                None: rows[of] - rows[to] - change.sum(0),
                "zeros": decoded[to] - rows[to],
                "mean": rows[:3].mean(0) - rows[to] - change.sum(0),
            }[ablation]
            for unit in asked:
                if unit.column == column:
                    moved = error if unit.feature == -1 else change[unit.feature]
                    written = found[unit.number][place]
                    np.testing.assert_allclose(written, rows[to] + moved, **TOLERANCE)
                    assert len(found[unit.number]) == len(pairs)


def test_batches_have_few_rows_and_columns_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_features, "ROWS", 3)
    features = FeatureRows(Settings(), sweep(sae("standard")))
    asked = units((1, 0), (0, 1), (0, 2), (1, 3), (0, 4))
    batches = [[unit.number for unit in batch] for batch in features.batches(asked)]
    assert batches == [[1, 2, 4], [0], [3]]
    assert [*features.batches([])] == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"bytes": 2 << 20}, "sae_cache_mib"),
        ({"digest": "other"}, "changed since it was registered"),
    ],
)
def test_an_autoencoder_that_changed_or_is_too_large_is_refused(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    stored = sae("standard", **changes)
    with refuses(says):
        rows_of(tmp_path, sweep(stored), units((0, 1)), **{"tuning.sae_cache_mib": 1})
    engine = TransformersEngine(
        Settings(model="m", artifacts_dir=str(ROOT.parent), tuning=Tuning(sae_cache_mib=1))
    )
    with refuses(says):
        engine._load_sae(stored)


def test_autoencoders_of_several_jobs_do_not_add_up(tmp_path: Path) -> None:
    gone = []
    for form in ("standard", "jumprelu"):
        rows_of(tmp_path, sweep(sae(form)), units((0, 1)))
        (loaded,) = sweep_features._LOADED.values()
        weakref.finalize(loaded, gone.append, form)
        del loaded
    assert gone == ["standard"]
    FeatureRows(Settings(), sweep(sae("standard"))).close()
    assert gone == ["standard"], "another job's stays"
    FeatureRows(Settings(), sweep(sae("jumprelu"))).close()
    assert gone == ["standard", "jumprelu"]
