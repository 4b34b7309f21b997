"""The demo model, in fp32 and in bf16: its rows against transformers on the same checkpoint, and a
direction out of them at work.

The direction's study is `examples/sentiment_direction.py`; what is tested here is its code, with
few prompts.
"""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from host import Host, capture_of, prompt_of
from lens_kit import Truth, check, lens, lenses
from nursery import Nursery
from processors import flags
from reference import Reference
from tokenizers import Tokenizer
from tolerances import (
    BF16_EXCESS,
    FP32_LAYERS,
    FP32_LOGPROBS,
    FP32_ROWS_30_LAYERS,
)

from midstream.schemas.base.tensors import from_numpy
from midstream.schemas.requests.specs import SteeringSpec
from midstream_ops.demo_model import fetch_demo_model

LAYERS = list(range(30))
#: bf16, nats: two units in the last place of a logit of 16 to 32; two products with the output
#: matrix round apart by one each.
BF16_LOGIT = 0.25
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
    return [
        np.stack([stream for _, stream in sorted(reference.post_block(prompt).items())])
        for prompt in PROMPTS
    ]


#: Without instructions for it, bfloat16 takes eight times as long.
BF16_MARK = pytest.mark.long if "avx512_bf16" in flags() else pytest.mark.matrix


@pytest.fixture(scope="module", params=["float32", pytest.param("bfloat16", marks=BF16_MARK)])
def host(
    request: pytest.FixtureRequest,
    model: Path,
    nursery: Nursery,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Host]:
    host = nursery.host(
        tmp_path_factory.mktemp(request.param) / "engine", model, **{"engine.dtype": request.param}
    )
    yield host
    host.close()


@pytest.fixture(scope="module")
def captured(host: Host) -> tuple[str, list[np.ndarray]]:
    """The model's dtype, and of each prompt `[layers, positions, hidden]`."""
    job = host.job(*PROMPTS, max_tokens=1, capture=capture_of(LAYERS, "all_prompt"))
    host.run(job)
    assert host.capture(job).dtype() == host.settings.vllm.dtype
    return host.settings.vllm.dtype, [
        host.capture(job).stack(request=number) for number in range(len(PROMPTS))
    ]


def layer_errors(got: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    return np.linalg.norm(got - wanted, axis=(1, 2)) / np.linalg.norm(wanted, axis=(1, 2))


def row_errors(got: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    return np.linalg.norm(got - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)


def test_every_row_of_the_demo_model_is_transformers_row(captured, truth, model) -> None:
    """fp32: equal up to the order of summation.

    bf16: no further from the fp32 truth than transformers in bf16 is.
    """
    dtype, rows = captured
    if dtype == "float32":
        for got, wanted in zip(rows, truth, strict=True):
            assert layer_errors(got, wanted).max() <= FP32_LAYERS
            assert row_errors(got, wanted).max() <= FP32_ROWS_30_LAYERS
        return
    for got, rounded, wanted in zip(rows, streams(model, torch.bfloat16), truth, strict=True):
        assert layer_errors(got, wanted).max() <= BF16_EXCESS * layer_errors(rounded, wanted).max()
        assert np.median(row_errors(got, wanted)) <= BF16_EXCESS * np.median(
            row_errors(rounded, wanted)
        )


# -- a direction
# --------------------------------------------------------------------------------------------------

#: Where the study finds most effect, and a scale at which it has not yet reached what the model can
#: say.
LAYER = 17
SCALE = 2.0
SOME_PROMPTS = slice(0, 100, 12)
TOKENS = 24


@pytest.fixture(scope="module")
def study() -> ModuleType:
    """The example, which is in no package."""
    path = Path(__file__).resolve().parents[2] / "examples" / "sentiment_direction.py"
    spec = importlib.util.spec_from_file_location("sentiment_direction", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


def tokenised(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [tokenizer.encode(text).ids for text in texts]


@pytest.mark.long
def test_a_captured_direction_steers_in_both_signs(host, study, tokenizer) -> None:
    found = study.materials()
    texts = tokenised(tokenizer, [*found.positive, *found.negative])
    job = host.job(*texts, max_tokens=1, capture=capture_of([LAYER], "all_prompt"))
    host.run(job)
    streams = [host.capture(job).stack(request=number) for number in range(len(texts))]
    half = len(found.positive)
    (direction,) = study.difference_of_means(streams[:half], streams[half:])
    prompts = tokenised(tokenizer, found.prompts[SOME_PROMPTS])

    def score(scale: float) -> float:
        steering = (
            host.steering(SteeringSpec(layers=LAYER, vector=from_numpy(direction), scale=scale))
            if scale
            else None
        )
        job = host.job(*prompts, max_tokens=TOKENS, steering=steering)
        return float(
            np.mean(
                [
                    study.word_score(output.text, found.words)
                    for output in host.run_together(job)[job.id]
                ]
            )
        )

    low = score(-SCALE)
    plain = score(0)
    high = score(SCALE)
    assert low < plain < high
    assert high - low >= 1.0, "a word more in every text"


@pytest.mark.long
def test_the_lens_of_the_demo_model_equals_transformers(host: Host, model: Path) -> None:
    """All layers in fp32; in bf16 the last layer's logit of each generated token is the largest, up
    to that logit's rounding.
    """
    job = host.job(PROMPTS[1], max_tokens=4, capture=lens(LAYERS, "all", tokens=(7, 40000)))
    (output,) = host.run(job)[job.id]
    (reading,) = lenses(host, job)
    first = len(PROMPTS[1]) - 1
    rounding = BF16_LOGIT if host.settings.vllm.dtype == "bfloat16" else 0.0
    for token, top, logprobs in zip(
        output.token_ids,
        reading.top_tokens[-1][first:],
        reading.top_logprobs[-1][first:],
        strict=True,
    ):
        assert logprobs[top.index(token)] >= logprobs[0] - rounding
    if host.settings.vllm.dtype == "float32":
        check(reading, Truth(model).logprobs((PROMPTS[1] + output.token_ids)[:-1]), FP32_LOGPROBS)
