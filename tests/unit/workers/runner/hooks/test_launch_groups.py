"""Sites share a launch exactly where their tensors are the same and nothing lies between them."""

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from tree import ROOT

from midstream.schemas.prompts.selectors import HOOKS, Hook
from midstream.workers.runner.hooks.architectures import (
    ARCHITECTURES,
    PRE_NORM,
    Variant,
    launch_groups,
)
from midstream.workers.runner.hooks.site_costs import CASES, launches, step_cost

PAIRS = [("attn_out", "post_attn"), ("mlp_in",), ("mlp_out", "post_block", "pre_attn")]
#: (launches before, after) of a layer with all its hooks in a traced forward; where it runs as
#: Python, of another number or none.
PER_LAYER = {
    "GPT2LMHeadModel": (6, 5, 6),
    "GPTNeoXForCausalLM": (6, 6, 6),
    "Gemma2ForCausalLM": (6, 3, 4),
    "Gemma3ForCausalLM": (6, 3, 4),
    "GemmaForCausalLM": (6, 3, 4),
    "LlamaForCausalLM": (6, 3, 4),
    "MistralForCausalLM": (6, 3, 4),
    "MixtralForCausalLM": (6, 3, 4),
    "OPTForCausalLM": (6, 5, 6),
    "Olmo2ForCausalLM": (5, 5, 5),
    "OlmoForCausalLM": (6, 6, 6),
    "Phi3ForCausalLM": (6, 3, 4),
    "Qwen2ForCausalLM": (6, 3, 4),
    "Qwen3ForCausalLM": (6, 3, 4),
    "Qwen3MoeForCausalLM": (6, 3, 4),
    "SmolLM3ForCausalLM": (6, 6, 6),
    "Starcoder2ForCausalLM": (6, 6, 6),
}
VARIANTS = {name: variants[-1] for name, variants in ARCHITECTURES.items()}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_launches_per_layer_before_and_after(name: str) -> None:
    variant = VARIANTS[name]
    sites = len([hook for hook in HOOKS if hook in variant.taps])
    traced, python = (
        len(launch_groups(variant, HOOKS, next_layer=next_layer)) for next_layer in (True, False)
    )
    assert (sites, traced, python) == PER_LAYER[name]


def test_groups_follow_from_the_installed_hooks() -> None:
    llama = VARIANTS["LlamaForCausalLM"]

    def groups(*hooks: Hook, next_layer: bool = True) -> list[tuple[Hook, ...]]:
        return launch_groups(llama, hooks, next_layer=next_layer)

    assert groups(*HOOKS) == PAIRS
    assert groups(*HOOKS, next_layer=False) == [
        *PAIRS[:2],
        ("mlp_out", "post_block"),
        ("pre_attn",),
    ]
    assert groups("post_block", "pre_attn") == [("post_block", "pre_attn")]
    assert groups("mlp_out", "pre_attn") == [("mlp_out", "pre_attn")]
    assert groups("attn_out", "mlp_out") == [("attn_out",), ("mlp_out",)]
    assert groups("post_attn", "pre_attn") == [("post_attn",), ("pre_attn",)]
    assert groups() == []


def test_a_layer_that_is_not_handed_on_as_it_is_shares_nothing_with_the_next() -> None:
    assert launch_groups(
        Variant("layers", PRE_NORM), ("post_block", "pre_attn"), next_layer=True
    ) == [
        ("post_block",),
        ("pre_attn",),
    ]


def test_each_group_takes_branches_before_pairs_and_each_hook_once() -> None:
    for variant in VARIANTS.values():
        groups = launch_groups(variant, HOOKS, next_layer=True)
        assert sorted(hook for group in groups for hook in group) == sorted(variant.taps)
        for group in groups:
            kinds = [variant.taps[hook].kind for hook in group]
            assert kinds == sorted(kinds, key=["single", "pair"].index)


# -- vLLM's loops over the layers
# ------------------------------------------------------------------------------------------

SPEC = importlib.util.find_spec("vllm")
MODELS = (
    Path(SPEC.origin).parent / "model_executor" / "models"
    if SPEC is not None and SPEC.origin
    else Path()
)
#: What may stand behind the layer's call: keeps states for EAGLE-3, which is not supported.
HARMLESS = {"_maybe_add_hidden_state"}


def loops(module: str) -> Iterator[ast.For]:
    """The loops over decoder layers in a module of vLLM's models, or in what it takes its model
    from.
    """
    tree = ast.parse((MODELS / f"{module}.py").read_text())
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.For)
        and re.search(r"self\.(layers|h)\b.*start_layer", ast.unparse(node.iter))
    ]
    if found:
        yield from found
        return
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and any("Model" in name.name or "CausalLM" in name.name for name in node.names)
        ):
            source = node.module.rpartition(".")[2]
            if source != module and (MODELS / f"{source}.py").is_file():
                yield from loops(source)


def chained(loop: ast.For) -> bool:
    """Whether what the layer gives is what the next one gets, under the same names, and nothing
    else happens.
    """
    target = loop.target.elts[-1] if isinstance(loop.target, ast.Tuple) else loop.target
    call, *rest = loop.body
    if not (
        isinstance(call, ast.Assign)
        and isinstance(call.value, ast.Call)
        and ast.unparse(call.value.func) == ast.unparse(target)
    ):
        return False
    given = [
        ast.unparse(name)
        for name in (
            call.targets[0].elts if isinstance(call.targets[0], ast.Tuple) else call.targets
        )
    ]
    taken = [ast.unparse(argument) for argument in call.value.args]
    others = [
        node
        for node in rest
        if not (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Call)
            and ast.unparse(node.value.func).split(".")[-1] in HARMLESS
        )
    ]
    return taken[-len(given) :] == given and not others


@pytest.mark.parametrize("name", [name for name, variant in VARIANTS.items() if variant.chained])
def test_the_model_s_loop_hands_a_layer_s_tensors_to_the_next(name: str) -> None:
    registered = re.search(rf'"{name}": \("(\w+)", "\w+"\)', (MODELS / "registry.py").read_text())
    assert registered is not None, f"{name} is not among vLLM's models"
    found = list(loops(registered[1]))
    assert found
    assert all(chained(loop) for loop in found)


@pytest.mark.parametrize(
    "between",
    [
        "hidden_states = hidden_states * 2",
        "states.append(hidden_states)",
        "hidden_states, residual = layer(residual, hidden_states)",
    ],
)
def test_a_loop_with_something_between_two_layers_is_found(between: str) -> None:
    body = ["hidden_states, residual = layer(positions, hidden_states, residual)", between]
    loop = ast.parse("for layer in self.layers:\n  " + "\n  ".join(body)).body[0]
    assert isinstance(loop, ast.For)
    assert not chained(loop)


# -- what it costs
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def costs() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "site_costs", ROOT / "benchmarks" / "site_costs.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_70b_takes_half_the_launches_and_an_idle_step_none(costs: ModuleType) -> None:
    model = costs.SHAPES[-1]
    before, merged, after = (costs.cost(model, HOOKS, design).launches for design in costs.DESIGNS)
    assert (before, merged, after) == (480, 241, 0)
    assert step_cost(model).unfused_seconds == 0


def test_bytes_are_those_of_rows_read_and_written(costs: ModuleType) -> None:
    model = costs.SHAPES[-1]
    row = 8192 * 2
    captured = step_cost(model, ("post_block",), captured=("post_block",))
    assert captured.bytes == 80 * 64 * 3 * row
    assert captured.host_bytes == 80 * 64 * row
    steered = step_cost(model, ("post_block",), edited=("post_block",), configurations=64)
    assert steered.bytes == 80 * 64 * (3 + 1) * row
    apart, together, _ = (
        costs.cost(model, HOOKS, design, captured=HOOKS).bytes for design in costs.DESIGNS
    )
    # Six sites read 1 or 2 rows each; merged, a launch reads a row once. All write six.
    assert apart == 64 * row * (80 * (3 * 2 + 3 * 1 + 6))
    assert together == 64 * row * (80 * (2 + 1 + 2 + 6) + 2)


def test_the_launches_of_a_forward_hold_every_site_once() -> None:
    for variant in VARIANTS.values():
        groups = launches(variant, HOOKS, 4)
        assert sorted(hook for group in groups for hook in group) == sorted([*variant.taps] * 4)


def test_the_table_is_the_page_s_and_has_a_row_for_each_model_and_case(costs: ModuleType) -> None:
    text = costs.table()
    assert text in (ROOT / "docs" / "kernels.md").read_text(), (
        "print it with `python benchmarks/site_costs.py`"
    )
    assert all(shape.name in text for shape in costs.SHAPES)
    assert all(f"| {case} |" in text for case in CASES)
