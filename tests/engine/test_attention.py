"""Attention patterns of captured queries and keys are transformers' eager attentions.

Real vLLM, tiny models in fp32.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from families import checkpoint
from host import Host, prompt_of, relative_error
from tiny import LAYERS
from tolerances import FP32_ATTENTION, FP32_ROWS
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from midstream.api.resolve.positions.captures import Bounds, PromptFacts, resolve_captures
from midstream.client.captures.reader import CaptureReader
from midstream.client.sdk.attention import attention_patches, by_layer
from midstream.schemas.base.tensors import from_numpy
from midstream.schemas.jobs.models import ModelInfo
from midstream.schemas.model.attention import AttentionKind
from midstream.schemas.requests.specs import CaptureSpec, PatchSource, PatchSpec

#: Of the tiny models whose heads have a width of their own.
HEADS = 4
HEAD_DIM = 32
QUERIES_AND_KEYS = CaptureSpec(hooks={"q": "all", "k": "all"}, positions="all", at="after")
#: Every kind that is served: plain, window in all or in some layers, softcap, sinks, chunks, fused
#: projections, the Transformers backend.
FAMILIES = [
    "mistral",
    "gemma2",
    "gemma3",
    "gpt2",
    "phi3",
    "qwen3",
    "olmo2",
    "gpt-oss",
    "llama4",
    "cohere2",
    "granite",
]


def transformers_patterns(path: Path, tokens: Sequence[int]) -> list[np.ndarray]:
    """Of each layer its eager attentions, float32 `[heads, query, key]`."""
    with torch.no_grad():
        found = _eager(path)(torch.tensor([list(tokens)]), output_attentions=True).attentions
    return [each[0].numpy() for each in found]


@cache
def _eager(path: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def captured(
    host: Host,
    *prompts: list[int],
    spec: CaptureSpec = QUERIES_AND_KEYS,
    max_tokens: int = 4,
    patch: Sequence[PatchSpec] = (),
) -> list[tuple[CaptureReader, list[int]]]:
    """Of each prompt, run together: its capture, and its tokens with those generated."""
    info = msgspec.convert(host.info, ModelInfo)
    jobs = []
    for prompt in prompts:
        bounds = Bounds(info, [PromptFacts(len(prompt))], max_tokens)
        job = host.job(
            prompt, max_tokens=max_tokens, steering=host.patches(patch, bounds) if patch else None
        )
        jobs.append(msgspec.structs.replace(job, captures=resolve_captures(spec, bounds)))
    outputs = host.run(*jobs)
    return [
        (host.capture(job), [*prompt, *outputs[job.id][0].token_ids])
        for job, prompt in zip(jobs, prompts, strict=True)
    ]


def largest_error(reader: CaptureReader, tokens: Sequence[int], path: Path) -> float:
    """Over all layers and heads, of every query's attention to every key.

    The last token was never fed back.
    """
    expected = transformers_patterns(path, tokens[:-1])
    return max(
        float(np.abs(reader.attention(layer) - pattern).max())
        for layer, pattern in enumerate(expected)
    )


@pytest.mark.parametrize("engine", ["v1", "tp2", "pp2"])
def test_the_model_reports_how_its_layers_attend(
    engine: str, request: pytest.FixtureRequest
) -> None:
    """Once for the whole model, whatever its ranks hold."""
    host: Host = request.getfixturevalue(engine)
    (kind,) = host.info["attention"]
    assert kind == {
        name: getattr(
            AttentionKind(
                layers=list(range(LAYERS)), heads=HEADS, head_dim=HEAD_DIM, scale=HEAD_DIM**-0.5
            ),
            name,
        )
        for name in kind
    }


@pytest.mark.parametrize(
    "engine",
    [
        "v1",
        *(pytest.param(name, marks=pytest.mark.matrix) for name in ("cached", "v2", "compiled")),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("tp2", "pp2")),
    ],
)
def test_patterns_are_transformers_on_every_engine(
    engine: str, llama: Path, qwen3: Path, request: pytest.FixtureRequest
) -> None:
    """Of prompts in one batch, prefilled in chunks where steps are short; a second time with a
    cached prefix where there is one.
    """
    host: Host = request.getfixturevalue(engine)
    path = qwen3 if engine in ("tp2", "pp2") else llama
    long = prompt_of(140)
    short = prompt_of(12, seed=5)
    for reader, tokens in [*captured(host, long, short), *captured(host, [*long[:130], *short])]:
        assert largest_error(reader, tokens, path) <= FP32_ATTENTION
        assert reader.attention(0, [1], queries=[-1]).shape == (1, 1, len(tokens) - 1)


def test_a_patched_pattern_gives_the_rows_of_a_transformers_model_that_attends_so(
    cached: Host, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two layers, the higher with the values that the lower gives it, beside an edit of values;
    and the same prompt without it.
    """
    rng = np.random.default_rng(4)
    prompt = prompt_of(150, seed=9)
    lowest = 1
    edited = np.full(64, 0.5, np.float32)
    patterns = {
        place: np.tril(rng.uniform(0, 0.2, (150, 150)))
        for place in ((1, 1), (1, 2), (1, 3), (2, 0))
    }
    patches = [
        PatchSpec(layers=1, hook="v", positions=[7], source=PatchSource(vector=from_numpy(edited)))
    ]
    for layer, wanted in by_layer(patterns, {}).items():
        values = CaptureSpec(hooks={"q": [layer], "v": [layer]}, positions="all_prompt", at="after")
        ((reader, _),) = captured(cached, prompt, spec=values, patch=patches)
        patches += attention_patches(reader, wanted)
    outputs = CaptureSpec(hooks={"post_block": "all"}, positions="all_prompt")
    ((found, _),) = captured(cached, prompt, spec=outputs, patch=patches)
    ((plain, _),) = captured(cached, prompt, spec=outputs)
    eager = modeling_llama.eager_attention_forward

    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *rest: Any,
        **more: Any,
    ) -> Any:
        if module.layer_idx == 1:
            value = value.clone()
            value[0, :, 7] = torch.from_numpy(edited).view(2, HEAD_DIM)
        given, weights = eager(module, query, key, value, *rest, **more)
        for (of, head), pattern in patterns.items():
            if module.layer_idx == of:
                given[0, :, head] = (
                    torch.from_numpy(pattern).float()
                    @ value[0, head * value.shape[1] // query.shape[1]]
                )
        return given, weights

    def rows() -> list[np.ndarray]:
        kept: list[np.ndarray] = []
        hooks = [
            each.register_forward_hook(lambda *call: kept.append(_first(call[2])[0].numpy()))
            for each in _eager(llama).model.layers
        ]
        with torch.no_grad():
            _eager(llama)(torch.tensor([prompt]))
        for hook in hooks:
            hook.remove()
        return kept

    unpatched = rows()
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", attend)
    for number, (expected, before) in enumerate(zip(rows(), unpatched, strict=True)):
        assert relative_error(found.array(number), expected) <= FP32_ROWS
        assert relative_error(plain.array(number), before) <= FP32_ROWS
        assert (relative_error(expected, before) > 0.01) == (number >= lowest)


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.matrix
@pytest.mark.parametrize("name", FAMILIES)
def test_patterns_of_a_family_are_transformers(
    name: str, nurseries: Callable, tmp_path: Path
) -> None:
    """Prompts longer than the windows and chunks of the tiny models."""
    path = checkpoint(name, tmp_path / name)
    with closing(
        nurseries("v1").host(
            tmp_path / "engine",
            path,
            **{"engine.max_model_len": 128, "engine.block_size": 32, "engine.enforce_eager": True},
            hooks="all,inside",
        )
    ) as host:
        for reader, tokens in captured(host, prompt_of(60), prompt_of(7, seed=2)):
            assert largest_error(reader, tokens, path) <= FP32_ATTENTION
