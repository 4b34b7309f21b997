"""Does the table say what is supported, refuse the rest by name, and agree with the documents and
the checkpoints?
"""

import re

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

from midstream.schemas.prompts.selectors import HOOKS
from midstream.workers.runner.hooks.architectures import (
    ARCHITECTURES,
    BACKEND_CLASS,
    UNKNOWN,
    Tap,
    UnsupportedArchitectureError,
    Variant,
    describe,
)


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
        assert (adapter(name).hidden_size, adapter(name).num_layers) == (64, 4)


def test_a_model_that_takes_images_has_the_hooks_of_its_language_model() -> None:
    made = vision("qwen2.5-vl")
    assert (made.architecture, made.variant) == (
        "Qwen2_5_VLForConditionalGeneration",
        adapter("qwen2").variant,
    )
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
