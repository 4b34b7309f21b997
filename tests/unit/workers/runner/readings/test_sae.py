"""Sparse autoencoders give the numbers that sae-lens gives for the same files and rows;
`sae_rows.py` made both.
"""

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from sae_rows import FORMS, ROOT

from midstream.storage.formats.sae_files import (
    SaeError,
    decoder_row,
    feature_of,
    reading,
    tensors_of,
)
from midstream.workers.runner.readings import sae
from midstream.workers.runner.readings.sae import Autoencoder, load

NAMES = [*FORMS, "flat", "gemma_scope"]
#: Those whose features depend on their own weights alone.
RULED = ["standard", "bare", "jumprelu", "gated", "gemma_scope", "layer_norm", "constant_norm"]
#: Sums of 8 or 32 numbers of size 1, in another order.
TOLERANCE = {"atol": 2e-6, "rtol": 2e-6}


@pytest.fixture(scope="module")
def theirs() -> Mapping[str, np.ndarray]:
    with np.load(ROOT / "rows.npz") as arrays:
        return dict(arrays)


def loaded(name: str) -> Autoencoder:
    with reading(ROOT / name) as (content, _):
        return load(ROOT / name, content.digest)


@pytest.mark.parametrize("name", NAMES)
def test_activations_and_reconstructions_equal_those_of_sae_lens(
    name: str, theirs: Mapping[str, np.ndarray]
) -> None:
    autoencoder, rows = loaded(name), torch.tensor(theirs["rows"])
    activations = autoencoder.encode(rows)
    np.testing.assert_allclose(activations, theirs[f"{name}.activations"], **TOLERANCE)
    scaled = sae.NORMALISATIONS[autoencoder.form.normalize_activations](rows)
    np.testing.assert_allclose(
        autoencoder.decode(activations) * scaled.scale + scaled.shift,
        theirs[f"{name}.decoded"],
        **TOLERANCE,
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_top_features_are_the_largest_activations_in_any_chunks(
    name: str, theirs: Mapping[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sae, "CHUNK_BYTES", 2 * 4 * 32)
    rows, wanted, k = theirs["rows"], theirs[f"{name}.activations"], 7
    found = loaded(name).top(torch.tensor(rows), k)
    assert found.indices.shape == found.activations.shape == (len(rows), k)
    assert found.active.tolist() == (wanted > 0).sum(1).tolist()
    for row, indices, values in zip(wanted, found.indices, found.activations, strict=True):
        active = min(k, int((row > 0).sum()))
        assert (indices[active:] == -1).all()
        assert (values[active:] == 0).all()
        np.testing.assert_allclose(values[:active], np.sort(row)[::-1][:active], **TOLERANCE)
        np.testing.assert_allclose(row[indices[:active]], values[:active], **TOLERANCE)
    errors = np.linalg.norm(rows - theirs[f"{name}.decoded"], axis=1) / np.linalg.norm(rows, axis=1)
    np.testing.assert_allclose(found.errors, errors, **TOLERANCE)


@pytest.mark.parametrize("name", RULED)
def test_a_feature_alone_has_the_activation_that_sae_lens_gives_it(
    name: str, theirs: Mapping[str, np.ndarray]
) -> None:
    with reading(ROOT / name) as (content, file):
        tensors = tensors_of(content.form, file)
        for number in range(content.form.d_sae):
            rule = feature_of(content.form, tensors, number)
            read = sae.NORMALISATIONS[content.form.normalize_activations](
                torch.tensor(theirs["rows"])
            ).rows
            over = read.double().numpy() @ rule.encoder + rule.bias
            np.testing.assert_allclose(
                np.where(over > rule.threshold, over, 0),
                theirs[f"{name}.activations"][:, number],
                **TOLERANCE,
            )
            assert (rule.decoder == tensors["W_dec"][number]).all()


@pytest.mark.parametrize("name", [*RULED, "topk", "rescaled", "flat"])
def test_a_decoder_row_is_what_one_more_unit_of_activation_adds(
    name: str, theirs: Mapping[str, np.ndarray]
) -> None:
    autoencoder = loaded(name)
    with reading(ROOT / name) as (content, file):
        row = decoder_row(content.form, tensors_of(content.form, file), 3)
    activations = torch.tensor(theirs[f"{name}.activations"][:1])
    more = activations.clone()
    more[0, 3] += 1
    np.testing.assert_allclose(
        row, (autoencoder.decode(more) - autoencoder.decode(activations))[0], **TOLERANCE
    )


@pytest.mark.parametrize("name", ["topk", "rescaled", "flat"])
def test_a_feature_that_is_no_rule_of_its_own_weights_is_refused(name: str) -> None:
    with (
        reading(ROOT / name) as (content, file),
        pytest.raises(SaeError, match="depends on all other features"),
    ):
        feature_of(content.form, tensors_of(content.form, file), 0)


def test_files_of_another_content_are_not_loaded() -> None:
    with pytest.raises(SaeError, match="have changed since it was registered"):
        load(ROOT / "standard", "0" * 64)
