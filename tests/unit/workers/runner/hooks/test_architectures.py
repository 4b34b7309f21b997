"""Does the table say what is supported, refuse the rest by name, and agree with the documents and
the checkpoints?
"""

import ast
import importlib.util
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import pytest
import tiny_vision
from families import FAMILIES
from fidelity import ways_of
from fidelity_inside import beyond, read_table
from fidelity_page import PAGE, hooks_of, parse, read_page
from tiny import CHECKPOINTS, REFUSED
from tolerances import FIDELITY
from transformers import FalconConfig
from tree import ROOT

from midstream.schemas.prompts.selectors import HOOKS, Hook
from midstream.workers.runner.hooks.architectures import (
    ARCHITECTURES,
    BACKEND_CLASS,
    PRE_NORM,
    UNKNOWN,
    Tap,
    UnsupportedArchitectureError,
    Variant,
    describe,
    launch_groups,
)
from midstream_ops.site_costs import CASES, launches, step_cost


def adapter(name: str):
    made = (CHECKPOINTS | REFUSED)[name]
    return describe(made.architecture, made.hf_config())


def vision(name: str):
    made = (tiny_vision.CHECKPOINTS | tiny_vision.REFUSED)[name]
    return describe(made.architecture, made.hf_config())


def test_what_the_table_does_not_have_is_left_to_the_loaded_model() -> None:
    unknown = describe("FalconForCausalLM", FalconConfig())
    assert unknown.variant is UNKNOWN
    assert unknown.hooks == HOOKS


def test_a_configuration_without_a_residual_stream_is_refused_with_the_reason() -> None:
    with pytest.raises(
        UnsupportedArchitectureError, match=r"do_layer_norm_before=false.*no residual stream"
    ):
        adapter("opt-post-norm")
    assert adapter("opt").hooks == HOOKS


def test_the_config_decides_which_hooks_there_are() -> None:
    assert "post_attn" not in adapter("gpt-neox").hooks
    assert adapter("gpt-neox-sequential").hooks == HOOKS
    assert adapter("olmo2").hooks == tuple(hook for hook in HOOKS if hook != "mlp_in")


@pytest.mark.parametrize(
    ("name", "hook", "reason"),
    [("gpt-neox", "post_attn", "parallel"), ("olmo2", "mlp_in", "which is post_attn")],
)
def test_a_hook_that_does_not_exist_is_refused_by_name_with_the_reason(name, hook, reason) -> None:
    with pytest.raises(UnsupportedArchitectureError, match=f"has no {hook}: .*{reason}"):
        adapter(name).tap(hook, 1)


def test_the_backends_class_is_looked_up_by_what_its_config_says() -> None:
    config = CHECKPOINTS["olmo2"].hf_config()
    assert describe(BACKEND_CLASS, config) == describe("Olmo2ForCausalLM", config)


def test_widths_and_depths_come_from_the_text_config() -> None:
    for name in CHECKPOINTS:
        assert adapter(name).hidden_size == 64
        assert adapter(name).num_layers == 4


def test_a_model_that_takes_images_has_the_hooks_of_its_language_model() -> None:
    made = vision("qwen2.5-vl")
    assert made.architecture == "Qwen2_5_VLForConditionalGeneration"
    assert made.variant == adapter("qwen2").variant
    assert not vision("qwen3-vl").variant.chained  # something is added between its layers
    with pytest.raises(
        UnsupportedArchitectureError, match="use_bidirectional_attention=True is not served"
    ):
        vision("paligemma")


def test_nothing_is_deferred_before_the_first_layer() -> None:
    llama = adapter("llama")
    assert [llama.tap("pre_attn", layer).kind for layer in (0, 1)] == ["single", "pair"]
    assert llama.tap("post_block", 0).kind == "pair"


def test_every_missing_hook_has_a_reason_and_no_other_does() -> None:
    for variants in ARCHITECTURES.values():
        for variant in variants:
            if not variant.refused:
                assert set(variant.taps) | set(variant.absent) == set(HOOKS)
                assert not set(variant.taps) & set(variant.absent)


def test_every_variant_has_a_checkpoint_that_it_is_measured_on() -> None:
    measured = [adapter(name).variant for name in CHECKPOINTS]
    assert [
        variant
        for variants in ARCHITECTURES.values()
        for variant in variants
        if not variant.refused and variant not in measured
    ] == []


# -- the pages
# --------------------------------------------------------------------------------------------------


def test_every_hook_of_every_checkpoint_has_its_row_and_no_row_is_stale() -> None:
    wanted = {(name, hook) for name in CHECKPOINTS for hook in hooks_of(name)}
    found = read_page(PAGE.read_text()).keys()
    assert {(name, hook) for name, hook in found if name not in FAMILIES} == wanted
    assert {name for name, _ in found} == {*CHECKPOINTS, *FAMILIES}


def test_every_figure_is_there_and_within_its_tolerance() -> None:
    beyond = []
    for (name, hook), cells in read_page(PAGE.read_text()).items():
        for way in ways_of(name):
            figure = parse(cells[way.name])
            if not 0 < figure.worst <= way.tolerance:
                beyond.append(f"{name} {hook} {way.name}: {figure}")
    assert beyond == []


def test_hooks_inside_have_a_row_for_each_checkpoint_within_the_tolerance() -> None:
    table = read_table(PAGE.read_text())
    assert set(CHECKPOINTS) <= table.keys() <= {*CHECKPOINTS, *FAMILIES}
    assert {
        name: cells
        for name, row in table.items()
        if (cells := {hook: cell for hook, cell in row.items() if beyond(cell)})
    } == {}
    assert {
        name
        for name in CHECKPOINTS
        if not {"q", "k", "v", "z"} <= table[name].keys() or "not compared" in table[name].values()
    } == set()


def test_the_page_quotes_the_tolerances_that_hold() -> None:
    text = PAGE.read_text()
    assert [
        f"| {dtype} | {each.limit:g} | {each.reason} |" in text for dtype, each in FIDELITY.items()
    ] == [True] * len(FIDELITY)


ROW = re.compile(
    r"^\| `(?P<name>\w+)`(?:, `(?P<when>\w+=\w+)`)? \| (?P<by>[\w ]+) \| `(?P<layers>[\w.]+)` "
    r"\| (?P<shape>[\w -]+?) \| ?(?P<lacks>[^|]*?) ?\|$",
    re.M,
)


def test_the_table_of_architectures_is_the_page_s_row_for_row() -> None:
    page = (ROOT / "docs" / "architectures.md").read_text()
    shapes = _shapes(page)
    told = []
    for row in ROW.finditer(page):
        taps = {
            hook: tap
            for hook, tap in shapes[row["shape"]].items()
            if f"`{hook}`" not in row["lacks"]
        }
        told.append((row["name"], row["when"], row["by"], row["layers"], taps))
    assert told == [
        (
            name,
            _condition(variant),
            "Transformers backend" if variant.backend else "vLLM",
            variant.layers,
            _taps(variant),
        )
        for name, variants in ARCHITECTURES.items()
        for variant in variants
        if not variant.refused
    ]


def _shapes(page: str) -> dict[str, dict[str, str]]:
    """Shape → hook → where, as the page has it."""
    header = "| shape | " + " | ".join(HOOKS) + " |"
    lines = page[page.index(header) :].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {
        name: {hook: cell for hook, cell in zip(HOOKS, cells, strict=True) if cell}
        for name, *cells in rows
    }


def _taps(variant: Variant) -> dict[str, str]:
    return {
        hook: _where(tap)
        for hook, tap in sorted(variant.taps.items(), key=lambda item: HOOKS.index(item[0]))
    }


def _where(tap: Tap) -> str:
    return f"{tap.path or 'layer'} {tap.side}" + (", pair" if tap.kind == "pair" else "")


def _condition(variant: Variant) -> str | None:
    return ", ".join(f"{name}={value}" for name, value in variant.when.items()) or None


# --- Sites share a launch exactly where their tensors are the same and nothing lies between

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


@pytest.mark.parametrize(
    ("hooks", "next_layer", "groups"),
    [
        (HOOKS, True, PAIRS),
        (HOOKS, False, [*PAIRS[:2], ("mlp_out", "post_block"), ("pre_attn",)]),
        (["post_block", "pre_attn"], True, [("post_block", "pre_attn")]),
        (["mlp_out", "pre_attn"], True, [("mlp_out", "pre_attn")]),
        (["attn_out", "mlp_out"], True, [("attn_out",), ("mlp_out",)]),
        (["post_attn", "pre_attn"], True, [("post_attn",), ("pre_attn",)]),
        ([], True, []),
    ],
)
def test_groups_follow_from_the_installed_hooks(
    hooks: Sequence[Hook], next_layer: bool, groups: list[tuple[Hook, ...]]
) -> None:
    assert launch_groups(VARIANTS["LlamaForCausalLM"], hooks, next_layer=next_layer) == groups


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
        "kernel_costs", ROOT / "tools" / "pages" / "kernel_costs.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_70b_takes_half_the_launches_and_an_idle_step_none(costs: ModuleType) -> None:
    model = costs.SHAPES[-1]
    before, merged, after = (costs.cost(model, HOOKS, design).launches for design in costs.DESIGNS)
    assert before == 480
    assert merged == 241
    assert after == 0


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
    assert text in (ROOT / "docs" / "reference" / "kernels.md").read_text(), (
        "run python tools/pages/code_tables.py"
    )
    assert all(shape.name in text for shape in costs.SHAPES)
    assert all(f"| {case} |" in text for case in CASES)
