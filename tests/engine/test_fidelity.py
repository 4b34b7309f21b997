"""Captured and edited rows are transformers' rows: every architecture and hook, some of the other
ways to run them, and proven options of vLLM.

All of `docs/reference/fidelity.md` is measured by `make fidelity`; here every architecture runs on
v1 in fp32 and bf16, and a few compiled and on v2.
"""

from collections.abc import Callable
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fidelity import ALL, Outcome, Truth, capture, judge, options_of, run
from fidelity_page import Way, hooks_of
from host import Host, capture_of, prompt_of, relative_error
from option_cases import CASES, Case
from reference import Edit, Reference
from rows_kit import check_rows
from test_modes import one_of_each
from tiny import CHECKPOINTS, checkpoint
from tolerances import FP32_HOOKS

from midstream.schemas.prompts.selectors import STREAM_HOOKS

pytestmark = pytest.mark.long

EAGER = Way("v1", "eager", "float32")
#: Other ways, each of other kinds of models: pairs and single tensors, vLLM's own code and its
#: Transformers backend.
OTHERS = [
    ("gemma2", Way("v1", "compiled", "float32")),
    ("qwen3-moe", Way("v2", "eager", "float32")),
    ("gpt2", Way("v2", "eager", "float32")),
    ("olmo2", Way("v2", "compiled", "float32")),
]

#: Where all families of steering are tried, beside `test_interventions.py` (v1, eager, fp32) and
#: `test_modes.py`.
STEERED = [
    ("llama", Way("v1", "eager", "bfloat16")),
    ("gpt2", Way("v1", "compiled", "bfloat16")),
    ("gemma3", Way("v2", "eager", "bfloat16")),
    ("llama", Way("v2", "compiled", "float32")),
]


def rows(table: list[tuple[str, Way]]) -> list[Any]:
    """Rows of a table as parameters."""
    return [pytest.param(name, each, id=f"{name} {each.name}") for name, each in table]


#: Of different kinds; others are rows of the matrix.
SOME = ("llama", "gpt2", "gemma3", "qwen3-moe", "gemma2", "gpt-neox", "mixtral", "olmo2", "phi3")
MARKS = {name: () if name in SOME else pytest.mark.matrix for name in CHECKPOINTS}
Captured = Callable[[str, Way], list[dict[str, Outcome]]]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return lambda name: checkpoint(name, folder / name)


@pytest.fixture(scope="module")
def captured(checkpoints, nurseries, tmp_path_factory: pytest.TempPathFactory) -> Captured:
    """What an engine captured of a checkpoint; each is started once."""
    folder = tmp_path_factory.mktemp("engines")
    return cache(lambda name, way: run(nurseries(way.runner), folder, name, checkpoints(name), way))


# field case 2, 3, 4, 8
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(pytest.param(name, "float32", marks=marks) for name, marks in MARKS.items()),
        *(
            pytest.param(name, "bfloat16", marks=() if name == "gpt2" else pytest.mark.matrix)
            for name in MARKS
        ),
    ],
)
def test_every_hook_of_every_architecture_gives_transformers_rows_plain_and_edited(
    name: str, dtype: str, captured, checkpoints
) -> None:
    way = Way("v1", "eager", dtype)
    truth = Truth(checkpoints(name), dtype)
    figures = judge(captured(name, way), truth, dtype)
    assert tuple(figures) == truth.hooks
    assert {
        hook: str(figure) for hook, figure in figures.items() if figure.worst > way.tolerance
    } == {}


# field case 5
@pytest.mark.matrix
@pytest.mark.parametrize(("name", "way"), rows(OTHERS))
def test_compiled_and_v2_captures_match_transformers(
    name: str, way: Way, captured, checkpoints
) -> None:
    """A site that a compiler dropped would give zeros, and an edit there would do nothing."""
    figures = judge(captured(name, way), Truth(checkpoints(name), way.dtype), way.dtype)
    assert {
        hook: str(figure) for hook, figure in figures.items() if figure.worst > way.tolerance
    } == {}


# field case 5
@pytest.mark.matrix
@pytest.mark.parametrize(("name", "way"), rows(STEERED))
def test_every_family_at_every_hook_gives_transformers_rows_in_every_way_to_run(
    name: str, way: Way, checkpoints, nurseries, tmp_path
) -> None:
    """A request for each hook with every family there, and a plain one among them."""
    host = nurseries(way.runner).host(tmp_path / "engine", checkpoints(name), **options_of(way))
    hooks = hooks_of(name)
    with closing(host):
        everything = capture_of([], "all", sites={hook: ALL for hook in hooks})
        asked: dict[str, list[Edit]] = {"": []} | {
            hook: [
                edit
                for edit in one_of_each(3, hook=hook)
                if hook in STREAM_HOOKS or not edit.norm_match
            ]
            for hook in hooks
        }
        jobs = {
            hook: host.job(
                prompt_of(20, seed=number),
                max_tokens=3,
                capture=everything,
                steering=host.steering(*edits),
            )
            for number, (hook, edits) in enumerate(asked.items())
        }
        host.run(*jobs.values())
        captured = {hook: host.capture(job) for hook, job in jobs.items()}
    truth = Truth(checkpoints(name), way.dtype)
    exceeded = {}
    for hook, reader in captured.items():
        rows = {(place, layer): reader.array(layer, place) for place in hooks for layer in ALL}
        errors = truth.errors(rows, reader.token_ids(), asked[hook])
        exceeded |= {
            f"edited at {hook or 'none'}, rows of {place}": error
            for place, error in errors.items()
            if error > way.tolerance
        }
    assert exceeded == {}


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "split"), [("mixtral", "tensor_parallel_size"), ("olmo2", "pipeline_parallel_size")]
)
def test_captures_of_two_ranks_match_transformers(
    name: str, split: str, checkpoints, two_ranks, tmp_path
) -> None:
    """A branch is whole only after the ranks' parts were summed; a later stage's first layer gets
    the stream from the stage before.
    """
    with closing(Host(tmp_path, checkpoints(name), **options_of(EAGER), **{split: 2})) as host:
        outcomes = capture(host, hooks_of(name))
    figures = judge([outcomes], Truth(checkpoints(name), EAGER.dtype), EAGER.dtype)
    assert {
        hook: str(figure) for hook, figure in figures.items() if figure.worst > EAGER.tolerance
    } == {}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bloom", "its tanh approximation"),
        ("opt-post-norm", "there is no residual stream"),
        ("gpt2-by-layer", "scale_attn_by_inverse_layer_idx=True is not served"),
    ],
)
def test_unsupported_architectures_are_refused_at_boot(
    name, reason, checkpoints, nurseries, tmp_path
) -> None:
    with pytest.raises(AssertionError, match=reason):
        nurseries("v1").host(tmp_path / name, checkpoints(name), **{"engine.max_model_len": 128})


def test_rows_differ_from_transformers_where_the_caveat_says_so_and_nowhere_else(
    checkpoints, nurseries, tmp_path
) -> None:
    """Longrope: prompts of up to 64 tokens while longer ones are possible.

    The caveat is in the model's description and every manifest.
    """
    truth = Reference(checkpoints("phi3-longrope"))
    sites = {"post_block": list(ALL)}
    for max_model_len, prompts in ((128, {20: False, 100: True}), (64, {20: True})):
        settings = options_of(EAGER) | {"engine.max_model_len": max_model_len}
        with closing(
            nurseries("v1").host(
                tmp_path / str(max_model_len), checkpoints("phi3-longrope"), **settings
            )
        ) as host:
            for length, alike in prompts.items():
                job = host.job(
                    prompt_of(length),
                    max_tokens=1,
                    capture=capture_of([], "all_prompt", sites=sites),
                )
                host.run(job)
                rows = truth.rows(prompt_of(length))
                reader = host.capture(job)
                error = max(
                    relative_error(reader.array(layer), rows["post_block", layer]) for layer in ALL
                )
                assert error <= FP32_HOOKS if alike else error > 0.01, (
                    max_model_len,
                    length,
                    error,
                )
                assert reader.manifest().caveats == host.info["caveats"]
            assert [
                "long factors" in caveat
                for caveat in host.info["caveats"]
                if "certif" not in caveat
            ] == [True] * (max_model_len > 64)


# field case 14
@pytest.mark.parametrize("name", ["gemma3", "gpt2"])
def test_a_cached_prompt_gives_the_rows_that_were_computed_before(
    name: str, checkpoints, nurseries, tmp_path
) -> None:
    """Also where layers with a sliding window keep their blocks apart from the others' (Gemma
    3).
    """
    settings = options_of(EAGER) | {
        "engine.max_model_len": 512,
        "engine.enable_prefix_caching": True,
    }
    with closing(nurseries("v1").host(tmp_path / name, checkpoints(name), **settings)) as host:
        reference = Reference(checkpoints(name))
        prompt = prompt_of(300, seed=5)
        sites = {hook: list(ALL) for hook in hooks_of(name)}
        found = []
        for _ in range(2):
            job = host.job(prompt, max_tokens=2, capture=capture_of([], "all", sites=sites))
            outputs = host.run(job)[job.id]
            check_rows(host, reference, job, outputs, tolerance=FP32_HOOKS)
            served = outputs[0].cached_tokens
            reused = sum(file.reused for file in host.receipts(job)[0].files)
            assert reused == served * len(sites) * len(ALL)
            reader = host.capture(job)
            rows = [reader.array(layer, hook)[:256] for hook in sites for layer in ALL]
            found.append((served, np.stack(rows)))
        (none, computed), (served, kept) = found
        assert none == 0 < served <= 256
        assert np.array_equal(kept[:, :served], computed[:, :served])


# --- Options of vLLM in the list of proven ones ---------------------------------------------------


TOKENS = 3


def run_case(case: Case, folder: Path, nurseries) -> str:
    """Raises AssertionError where rows or tokens are not transformers'; returns the largest
    figures.
    """
    path = checkpoint(case.name, folder / case.name)
    served = case.served(folder, path) if case.served else path
    truth = case.truth(folder, path) if case.truth else path
    way = Way(
        "v1",
        "eager" if case.settings.get("engine.enforce_eager", True) else "compiled",
        str(case.settings.get("engine.dtype", "float32")),
    )
    settings = options_of(way) | case.settings | {"engine_options": case.options(folder, path)}
    env = {"HF_HUB_OFFLINE": "1"}
    if case.on_hub:
        env["HF_HUB_CACHE"] = str(folder / "hub")
    if case.ranks > 1 or case.on_hub:
        (folder / "engine").mkdir()
        host = Host(
            folder / "engine",
            served,
            env,
            **{"engine.tensor_parallel_size": case.ranks},
            **settings,
        )
    else:
        host = nurseries("v1").host(folder / "engine", served, env, **settings)
    with closing(host):
        assert [caveat for caveat in host.info["caveats"] if "certif" not in caveat] == []
        outcomes = [
            capture(host, hooks_of(case.name), draw)
            for draw in range(2 if way.dtype == "float32" else 1)
        ]
    figures = [judge([outcome], Truth(truth, way.dtype), way.dtype) for outcome in outcomes]
    assert {
        hook: str(figure)
        for each in figures
        for hook, figure in each.items()
        if figure.worst > way.tolerance
    } == {}
    if way.dtype == "float32":
        reference = Reference(truth)
        tokens = outcomes[0][""].token_ids
        reference.rows(tokens)
        assert tokens[-TOKENS + 1 :] == reference.logits[-TOKENS:-1].argmax(axis=-1).tolist()
    return str(max(figure.worst for each in figures for figure in each.values()))


def _marks(case: Case) -> list[pytest.MarkDecorator]:
    if case.fast:
        return []
    return [pytest.mark.matrix, pytest.mark.ranks] if case.ranks > 1 else [pytest.mark.matrix]


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.id, marks=_marks(case)) for case in CASES]
)
def test_a_proven_option_gives_transformers_rows_and_tokens(
    case: Case, nurseries, tmp_path: Path
) -> None:
    run_case(case, tmp_path, nurseries)
