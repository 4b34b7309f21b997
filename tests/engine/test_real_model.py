"""The demo model's rows against transformers on the same checkpoint, in fp32 and in bf16."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from host import Host, capture_of, prompt_of
from reference import Reference
from tolerances import BF16_EXCESS, FP32_LAYERS, FP32_ROWS_30_LAYERS

from midstream.client.models import fetch_demo_model

LAYERS = list(range(30))
PROMPTS = [prompt_of(length, seed=length) for length in (3, 40, 150)]


@pytest.fixture(scope="module")
def model() -> Path:
    return fetch_demo_model()


@pytest.fixture(scope="module")
def truth(model: Path) -> list[np.ndarray]:
    return streams(model, torch.float32)


def streams(model: Path, dtype: torch.dtype) -> list[np.ndarray]:
    """Of each prompt: `[layers, positions, hidden]` float32."""
    reference = Reference(model, dtype)
    return [np.stack([stream for _, stream in sorted(reference.post_block(prompt).items())]) for prompt in PROMPTS]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def captured(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, list[np.ndarray]]]:
    host = Host(tmp_path_factory.mktemp(request.param), model, dtype=request.param)
    try:
        job = host.job(*PROMPTS, max_tokens=1, capture=capture_of(LAYERS, "all_prompt"))
        host.run(job)
        assert host.capture(job).dtype() == request.param
        yield request.param, [host.capture(job).stack(request=number) for number in range(len(PROMPTS))]
    finally:
        host.close()


def layer_errors(got: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    return np.linalg.norm(got - wanted, axis=(1, 2)) / np.linalg.norm(wanted, axis=(1, 2))


def row_errors(got: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    return np.linalg.norm(got - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)


def test_every_row_of_the_demo_model_is_transformers_row(captured, truth, model) -> None:
    """fp32: equal up to the order of summation. bf16: no further from the fp32 truth than transformers in bf16 is."""
    dtype, rows = captured
    if dtype == "float32":
        for got, wanted in zip(rows, truth, strict=True):
            assert layer_errors(got, wanted).max() <= FP32_LAYERS
            assert row_errors(got, wanted).max() <= FP32_ROWS_30_LAYERS
        return
    rounding = streams(model, torch.bfloat16)
    for got, rounded, wanted in zip(rows, rounding, truth, strict=True):
        assert layer_errors(got, wanted).max() <= BF16_EXCESS * layer_errors(rounded, wanted).max()
        assert np.median(row_errors(got, wanted)) <= BF16_EXCESS * np.median(row_errors(rounded, wanted))
