"""Files of Jacobian lenses: what is written is what is read."""

from pathlib import Path

import numpy as np
import torch
from refusal_kit import refuses

from midstream.schemas.artifacts.jacobian_lenses import JacobianRecord
from midstream.storage.formats.lens_files import (
    Matrix,
    check_jacobian,
    write,
)

WIDTH = 8
VOCABULARY = 20
JACOBIANS = {
    layer: torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(layer))
    for layer in (0, 2)
}
HEAD = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(9))
FIT = JacobianRecord(method="exact", prompts=3, rank=WIDTH)


def test_a_written_lens_is_read_with_its_record(tmp_path: Path) -> None:
    arrays = {layer: matrix.numpy() for layer, matrix in JACOBIANS.items()}
    write(tmp_path, arrays, FIT, Matrix(HEAD.numpy()))
    content = check_jacobian(tmp_path, 3, WIDTH)
    assert content.layers == [0, 2]
    assert content.vocabulary == VOCABULARY
    assert content.fit == FIT
    write(tmp_path, arrays, FIT)
    assert check_jacobian(tmp_path, 3, WIDTH).vocabulary == 0
    assert [path.name for path in tmp_path.iterdir()] == ["lens.safetensors"]


def test_a_lens_that_does_not_fit_the_model_is_refused_by_path(tmp_path: Path) -> None:
    arrays = {layer: matrix.numpy() for layer, matrix in JACOBIANS.items()}
    bad = {"deep": (2, "this model has no layer 2"), "nan": (3, "0.weight has values that are not")}
    write(tmp_path / "deep", arrays, FIT)
    write(tmp_path / "nan", arrays | {0: np.full((WIDTH, WIDTH), np.nan)}, FIT)
    write(tmp_path / "head", arrays, FIT, Matrix(HEAD.numpy()[:, :-1].copy()))
    for name, (layers, says) in {**bad, "head": (3, "unembedding has the shape")}.items():
        with refuses(match=says, field="path"):
            check_jacobian(tmp_path / name, layers, WIDTH)
