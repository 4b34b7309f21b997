"""Does `docs/models.md` say what the walk found, and does the reference of the walk refuse what it
cannot know?
"""

import json
from dataclasses import replace

import configs
import page
import pytest
import reference
import results
import torch
from families import CHANGED, FAMILIES
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

FOUND = results.read()


def test_the_page_has_the_results_of_the_walk() -> None:
    text = page.PAGE.read_text()
    assert page.rewritten(text, FOUND) == text


def test_sixty_classes_and_every_named_family_equal_transformers() -> None:
    """Those of the families that stock vLLM runs here."""
    served = [result for result in FOUND.values() if result.outcome == "served"]
    assert len(page.distinct(served)) >= 60
    stock = [architecture for name, architecture in FAMILIES.items() if name not in CHANGED]
    assert {name: FOUND[name].outcome for name in stock} == dict.fromkeys(stock, "served")


def test_nothing_that_differs_is_served() -> None:
    """What the walk finds to differ gets a rule, and is refused from then on."""
    assert [result.name for result in FOUND.values() if result.outcome == "differs"] == []


def test_every_served_class_is_certified() -> None:
    served = [result for result in FOUND.values() if result.outcome in ("served", "laws")]
    assert [result.name for result in served if not result.laws] == []


def test_what_transformers_does_not_have_is_tried_and_served_with_a_caveat() -> None:
    alone = {name: result.outcome for name, result in FOUND.items() if not configs.has_class(name)}
    assert {name for name, result in FOUND.items() if result.alone} == alone.keys()
    assert set(alone.values()) == {"laws", "refused"}
    for name in (name for name, outcome in alone.items() if outcome == "laws"):
        assert any(page.LOADED in caveat for caveat in FOUND[name].caveats)


def test_a_result_is_one_line_that_a_newer_one_replaces(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results.jsonl")
    first = results.Result("LlamaForCausalLM", "refused", why="no reason")
    for each in (
        first,
        results.Result("AfmoeForCausalLM", "served"),
        replace(first, outcome="served", why=""),
    ):
        results.keep(each)
    assert list(results.read()) == ["AfmoeForCausalLM", "LlamaForCausalLM"]
    assert results.read()["LlamaForCausalLM"].outcome == "served"
    assert len([json.loads(line) for line in results.RESULTS.read_text().splitlines()]) == 2


def test_a_generated_config_is_tiny_and_keeps_every_kind_of_layer() -> None:
    for name in ("Qwen3NextForCausalLM", "Gemma3ForConditionalGeneration", "DeepseekV3ForCausalLM"):
        text = configs.tiny_config(name).get_text_config()
        assert (text.hidden_size, text.num_hidden_layers, text.vocab_size) == (64, 4, 512)
    assert len(set(configs.tiny_config("Qwen3NextForCausalLM").layer_types)) == 2


class Twice(nn.Module):
    """Adds what the MLP gives twice: no sum that a hook point could be."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.mlp, self.self_attn, self.norm = (
            layer.mlp,
            layer.self_attn,
            layer.post_attention_layernorm,
        )

    def forward(self, hidden_states: torch.Tensor, **named: object) -> torch.Tensor:
        hidden_states = hidden_states + self.self_attn(hidden_states=hidden_states, **named)[0]
        given = self.mlp(self.norm(hidden_states))
        return hidden_states + given + given.relu()


def test_the_reference_knows_no_layer_whose_output_is_no_sum(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LlamaConfig(
        **{
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "vocab_size": 64,
        }
    )
    model = LlamaForCausalLM(config).eval()
    monkeypatch.setattr(reference, "load", lambda path, dtype: model)
    assert reference.Reference(tmp_path).hooks == reference.HOOKS
    model.model.layers[1] = Twice(model.model.layers[1])
    with pytest.raises(reference.UnknownLayerError):
        reference.Reference(tmp_path)
