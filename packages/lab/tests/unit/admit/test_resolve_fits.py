"""Validation of fits: what is stored, and which field a 400 names."""

import asyncio
from typing import Any

import msgspec
import pytest
from plan_kit import CODEC, model
from refusal_kit import refuses

from midstream.schemas.artifacts.jacobian_lenses import JacobianFit, StoredLensFit
from midstream_lab.admit import fits
from midstream_lab.records.fits import FitRequest, FitTokens, LensFitRequest, StoredModuleFit

HERE = ["The Eiffel Tower is in"] * 8
THERE = ["The Colosseum is in"] * 8
EXAMPLES = [{"prompt": "The Tower is in", "target": " Rome"}] * 8


def resolve(method: str = "difference_of_means", **fields: Any) -> StoredModuleFit:
    given = {"positive": HERE, "negative": THERE} if "examples" not in fields else {}
    body = {"model": "m", "name": "n", "method": method, "layers": [-1], **given, **fields}
    return asyncio.run(fits.resolve_fit(msgspec.convert(body, FitRequest), model(), CODEC))


def test_prompts_targets_and_token_ids_are_tokenised_as_those_of_jobs() -> None:
    stored = resolve()
    expected = FitTokens(token_ids=[1, 2, 5, 6, 7], prompt_tokens=5, at="last_prompt")
    assert stored.negative[0] == expected
    assert stored.hook == "post_block"
    assert stored.layers == [3]
    assert stored.template.family == "add"
    assert stored.request.positive == []
    assert stored.tokens == 2 * 8 * (6 + 5)
    first, *_ = resolve("vector", examples=EXAMPLES).examples
    assert first == FitTokens(token_ids=[1, 2, 4, 6, 7, 10], prompt_tokens=5, at="all")
    stored = resolve("vector", examples=[{"prompt": [2, 3], "target": [9, 10]}] * 8)
    assert stored.examples[0].token_ids == [2, 3, 9, 10]
    assert stored.tokens == 2 * 8 * 4 + 3 * 200 * 8 * 4


def test_reft_is_stored_as_lowrank_at_the_positions_of_each_prompt() -> None:
    template = resolve("reft", examples=EXAMPLES, rank=2, positions=[-1]).template
    assert template.family == "lowrank"
    assert template.rank == 2
    assert template.numbers == [1.0]
    assert template.positions == [-1]
    assert template.tensors == []
    assert resolve("reft", examples=EXAMPLES, positions=[-1, 0]).examples[0].at == [0, 4]


def test_digest_depends_on_the_examples_alone() -> None:
    assert resolve().digest == resolve("logistic", seed=3).digest
    assert resolve().digest != resolve(positive=THERE, negative=HERE).digest


@pytest.mark.parametrize(
    ("method", "fields", "field", "detail"),
    [
        ("pca", {"hook": "mlp_in"}, "hook", "unknown hook"),
        ("pca", {"layers": 4}, "layers", "layers 0 to 3"),
        ("pca", {"layers": []}, "layers", "at least one"),
        ("pca", {"positive": HERE[:7]}, "positive", "8 or more"),
        ("logistic", {"negative": []}, "negative", "8 or more"),
        ("pca", {"negative": [*THERE, *THERE]}, "negative", "needs pairs"),
        ("vector", {"examples": EXAMPLES[:5]}, "examples", "8 or more"),
        ("vector", {"examples": EXAMPLES, "positive": HERE}, "positive", "not valid"),
        ("pca", {"positive": ["", *HERE[1:]]}, "positive[0]", "empty"),
        ("pca", {"negative": [[99], *THERE[1:]]}, "negative[0][0]", "vocabulary"),
        ("pca", {"negative": [[2] * 40, *THERE[1:]]}, "negative[0]", "40"),
        ("pca", {"read": [7]}, "read[0]", "positive[0]: position 7"),
        ("vector", {"examples": EXAMPLES, "positions": [9]}, "positions[0]", "examples[0]"),
        (
            "vector",
            {"examples": EXAMPLES, "positions": {"start": 9}},
            "positions",
            "no token of examples[0]",
        ),
        (
            "vector",
            {"examples": [{"prompt": "The Tower of", "target": "Paris"}] * 8},
            "examples[0].target",
            "changes the tokens before it",
        ),
        (
            "vector",
            {"examples": [{"prompt": [2], "target": " Paris"}] * 8},
            "examples[0].target",
            "token ids",
        ),
        (
            "vector",
            {"examples": [{"prompt": [2] * 20, "target": [3] * 20}] * 8},
            "examples[0].target",
            "40",
        ),
    ],
)
def test_refusals_name_the_field(
    method: str, fields: dict[str, Any], field: str, detail: str
) -> None:
    with refuses(detail, field=field, status=400):
        resolve(method, **fields)


@pytest.mark.parametrize(
    ("limit", "field"), [("MAX_FIT_TOKENS", "positive"), ("MAX_FIT_WORK", "steps")]
)
def test_limits_of_tokens(limit: str, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fits, limit, 80)
    with refuses(field=field, allowed="at most 80"):
        resolve()


def test_hooks_inside_attention_are_refused() -> None:
    body = FitRequest(
        model="m", name="n", method="pca", layers=0, hook="z", positive=HERE, negative=THERE
    )
    with refuses(field="hook"):
        asyncio.run(fits.resolve_fit(body, model(hooks=["post_block", "z"]), CODEC))


def resolve_lens(**fields: Any) -> StoredLensFit:
    body = {"model": "m", "name": "n", "prompts": [*HERE, [2, 3]], "skip_first": 1, **fields}
    return asyncio.run(fits.resolve_lens_fit(msgspec.convert(body, LensFitRequest), model(), CODEC))


def test_lens_keeps_the_tokens_that_it_uses() -> None:
    stored = resolve_lens(max_tokens=3, rank=4, seed=5)
    assert stored.prompts[0] == [1, 2, 3]
    assert stored.prompts[-1] == [2, 3]
    assert stored.layers == [0, 1, 2]
    assert stored.folder == "n"
    assert stored.fit == JacobianFit(max_tokens=3, rank=4, seed=5, skip_first=1)
    assert stored.tokens == (8 * 3 + 2) * (1 + 4)
    assert resolve_lens(folder="mine", layers=[-2]).folder == "mine"


def test_lens_request_has_the_fields_and_defaults_of_its_fit() -> None:
    of_fit, of_request = (
        {field.encode_name: (field.type, field.default) for field in msgspec.structs.fields(kind)}
        for kind in (JacobianFit, LensFitRequest)
    )
    assert of_fit == {name: of_request[name] for name in of_fit}


@pytest.mark.parametrize(
    ("fields", "field", "detail"),
    [
        ({"prompts": []}, "prompts", "has 0"),
        ({"prompts": [[2, 3]]}, "prompts", "has 0 of 3 tokens"),
        ({"prompts": ["", *HERE]}, "prompts[0]", "empty"),
        ({"prompts": [[2, 3, 9999]]}, "prompts[0][2]", "vocabulary"),
        ({"rank": 1, "prompts": HERE[:1]}, "prompts", "hidden size / `rank`"),
        ({"rank": 9999}, "rank", "is 9999"),
        ({"max_tokens": 2}, "max_tokens", "is 2"),
        ({"layers": 4}, "layers", "layers 0 to 3"),
        ({"layers": -1}, "layers", "3 is the last layer"),
    ],
)
def test_refusals_of_a_lens_name_the_field(fields: dict[str, Any], field: str, detail: str) -> None:
    with refuses(detail, field=field, status=400):
        resolve_lens(**fields)


@pytest.mark.parametrize(
    ("limit", "fields", "field"),
    [
        ("MAX_FIT_TOKENS", {}, "prompts"),
        ("MAX_LENS_WORK", {}, "rank"),
        ("MAX_LENS_WORK", {"rank": 8}, "prompts"),
        ("MAX_TUNED_BYTES", {}, "layers"),
    ],
)
def test_limits_of_a_lens(
    limit: str, fields: dict[str, Any], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fits, limit, 40)
    with refuses(field=field, status=400):
        resolve_lens(**fields)
