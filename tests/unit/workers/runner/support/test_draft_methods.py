"""Which drafters are served, and that every other method, option and mismatch is refused by name
before weights are read.
"""

import asyncio
import json
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from vllm.config import SpeculativeConfig
from vllm.config.speculative import SpeculativeMethod
from vllm.model_executor.models.llama import LlamaForCausalLM

from midstream.schemas.settings.settings import Settings, SettingsError
from midstream.schemas.settings.vllm_options import VllmOptions
from midstream.workers.engine.options.drafts import check_drafter, check_drafts, speculative_config
from midstream.workers.engine.options.engine_arguments import engine_options
from midstream.workers.engine.vllm import VllmEngine
from midstream.workers.runner.support.drafters import (
    CONDITIONS,
    OF_HEADS,
    PROVEN,
    REFUSED,
    UnsupportedDrafterError,
    check_loaded,
    verdict,
)
from midstream.workers.runner.support.rules import SettingRule

#: Of a served method another value of each field that has a condition.
OTHER_VALUES: dict[str, Any] = {
    "rejection_sample_method": "block",
    "draft_sample_method": "probabilistic",
    "parallel_drafting": True,
    "enable_adaptive_verification": True,
    "num_speculative_tokens_per_batch_size": [(1, 2, 3)],
    "use_heterogeneous_vocab": True,
    "use_local_argmax_reduction": True,
    "disable_padded_drafter_batch": True,
    "disable_eagle_block_drop": True,
    "index_share_for_mtp_iteration": True,
}
ARCHITECTURE = {"eagle3": "LlamaForCausalLMEagle3", "mtp": "MiMoMTPModel"}


def drafting(method: str, **options: Any) -> Any:
    """vLLM's config with drafts, as far as `verdict` reads it; whole ones ask for checkpoints."""
    head = SimpleNamespace(hidden_size=16, vocab_size=32, **options.pop("head", {}))
    model = SimpleNamespace(
        architectures=[options.pop("architecture", ARCHITECTURE.get(method))], hf_config=head
    )
    defaults = {field.name: field.default for field in fields(SpeculativeConfig)}  # type: ignore[arg-type]
    given = {
        "method": method,
        "model": "/models/head",
        "draft_tensor_parallel_size": 1,
        "draft_model_config": model,
    }
    target = {"is_hybrid": False, "is_attention_free": False, "architectures": ["LlamaForCausalLM"]}
    return SimpleNamespace(
        speculative_config=SimpleNamespace(**{**defaults, **given, **options}),
        scheduler_config=SimpleNamespace(async_scheduling=False),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        model_config=SimpleNamespace(
            **target, get_hidden_size=lambda: 16, get_vocab_size=lambda: 32
        ),
    )


@pytest.fixture(autouse=True)
def _target(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class of vLLM's that an EAGLE-3 head fits."""
    from midstream.workers.runner.support import drafters

    monkeypatch.setattr(drafters, "get_model_cls", lambda _: LlamaForCausalLM)


@pytest.mark.parametrize("method", [*PROVEN, *REFUSED, "draft_model", "of a later version"])
def test_a_method_is_proven_refused_with_a_reason_or_unproven(method: str) -> None:
    found = verdict(drafting(method))
    clause = f"speculative_config.method is '{method}', valid: ngram, eagle3, mtp"
    why = REFUSED.get(method)
    assert found.refused == ([f"{clause} ({why})"] if why else [])
    assert found.unproven == ([] if why or method in PROVEN else [clause])
    assert {*PROVEN, *REFUSED} <= set(get_args(SpeculativeMethod))


def test_without_drafts_nothing_is_refused() -> None:
    assert verdict(SimpleNamespace(speculative_config=None)) == ([], [])  # type: ignore[arg-type]


def option_of(rule: SettingRule) -> str:
    """The field of vLLM's `SpeculativeConfig`; empty for a rule on another section."""
    section, _, name = rule.name.partition(".")
    return name if section == "speculative_config" else ""


@pytest.mark.parametrize("method", PROVEN)
def test_another_value_of_each_option_is_refused_or_unproven_by_name(method: str) -> None:
    rules = (*CONDITIONS, *(OF_HEADS if PROVEN[method] else ()))
    conditions = {name: rule for rule in rules if (name := option_of(rule)) in OTHER_VALUES}
    assert conditions.keys() == set(OTHER_VALUES) - (
        set() if PROVEN[method] else {option_of(rule) for rule in OF_HEADS}
    )
    for name, condition in conditions.items():
        found = verdict(drafting(method, **{name: OTHER_VALUES[name]}))
        (clause,) = found.refused if condition.why else found.unproven
        assert [*found.refused, *found.unproven] == [clause]
        assert clause.startswith(f"speculative_config.{name} is {OTHER_VALUES[name]!r}, valid: ")
        assert condition.why in clause


def test_an_option_that_vllm_no_longer_has_is_unproven() -> None:
    config = drafting("eagle3")
    del config.speculative_config.disable_eagle_block_drop
    assert verdict(config) == (
        [],
        ["speculative_config.disable_eagle_block_drop is not a setting of this vLLM"],
    )


def clauses(config: Any) -> list[str]:
    """What is refused or unproven."""
    found = verdict(config)
    return [*found.refused, *found.unproven]


def test_steps_that_overlap_are_refused_with_every_drafter() -> None:
    for method in PROVEN:
        config = drafting(method)
        config.scheduler_config.async_scheduling = True
        (found,) = clauses(config)
        assert (
            "async_scheduling is True, valid: False (positions are known only on the GPU" in found
        )


@pytest.mark.parametrize(
    ("alter", "message"),
    [
        (
            {"architecture": "Eagle3DeepseekV2ForCausalLM"},
            "is a Eagle3DeepseekV2ForCausalLM, valid: Eagle3LlamaForCausalLM, ",
        ),
        (
            {"draft_tensor_parallel_size": 2},
            "other than tensor_parallel_size is True, valid: False",
        ),
        ({"head": {"target_hidden_size": 64}}, "is of a model with hidden_size 64, valid: 16"),
        ({"head": {"target_vocab_size": 64}}, "is of a model with vocab_size 64, valid: 32"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(alter: dict[str, Any], message: str) -> None:
    (found,) = clauses(drafting("eagle3", **alter))
    assert message in found


@pytest.mark.parametrize(
    ("section", "value", "message"),
    [
        ("model_config.is_hybrid", True, "layers that have recurrent state"),
        (
            "parallel_config.pipeline_parallel_size",
            2,
            "pipeline_parallel_size with speculative_config is 2, valid: 1",
        ),
    ],
)
def test_a_model_that_a_head_cannot_serve_is_refused(
    section: str, value: Any, message: str
) -> None:
    config = drafting("eagle3")
    part, name = section.split(".")
    setattr(getattr(config, part), name, value)
    (found,) = clauses(config)
    assert message in found


def test_a_model_that_keeps_no_streams_for_a_head_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from midstream.workers.runner.support import drafters

    monkeypatch.setattr(drafters, "get_model_cls", lambda _: nn.Module)
    (found,) = verdict(drafting("eagle3")).refused
    assert "LlamaForCausalLM does not provide the rows that an EAGLE-3 head reads" in found


class _Head(nn.Module):
    """An EAGLE-3 head that reads two layers of a model 16 wide."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(32, 16)
        self.config = SimpleNamespace(vocab_size=32)
        self.draft_id_to_target_id = nn.Parameter(
            torch.zeros(8, dtype=torch.long), requires_grad=False
        )

    def combine_hidden_states(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.fc(hidden)


ADAPTER: Any = SimpleNamespace(num_layers=4, hidden_size=16)


@pytest.mark.parametrize(
    ("layers", "offset", "words"),
    [
        ((1, 2, 4), 0, r"does not read 3 layers \(after \(1, 2, 4\)\)"),
        ((1, 5), 0, r"after layers \(1, 5\), valid: 0 to 4"),
        ((1, 4), 25, "drafts tokens 0 to 32, valid: 0 to 31"),
    ],
)
def test_a_loaded_head_that_reads_other_layers_or_drafts_other_tokens_is_refused(
    layers: tuple[int, ...], offset: int, words: str
) -> None:
    check_loaded(None, (), ADAPTER)
    head = _Head()
    check_loaded(head, (1, 4), ADAPTER)
    head.draft_id_to_target_id[7] = offset
    with pytest.raises(UnsupportedDrafterError, match=words):
        check_loaded(head, layers, ADAPTER)


def test_a_drafter_that_runs_modules_with_sites_is_refused() -> None:
    head = _Head()
    head.fc.register_buffer("midstream_plan", torch.zeros(1), persistent=False)
    with pytest.raises(
        UnsupportedDrafterError, match=r"runs modules of the model that have hook points: fc"
    ):
        check_loaded(head, (1, 4), ADAPTER)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"drafter": "eagle3", "speculative_tokens": 3}, "draft_model is empty"),
        ({"drafter": "eagle3", "draft_model": "/no/such/head"}, "speculative_tokens is 0"),
        (
            {"drafter": "eagle3", "draft_model": "/no/such/head", "speculative_tokens": 3},
            "draft_model='/no/such/head': no checkpoint found",
        ),
        (
            {"draft_model": "/models/head", "speculative_tokens": 3},
            "drafter is 'ngram': only `eagle3` has a draft model",
        ),
        (
            {"drafter": "mtp", "draft_model": "/models/head", "speculative_tokens": 1},
            "drafter is 'mtp': only `eagle3` has a draft model",
        ),
        ({"drafter": "mtp"}, "speculative_tokens is 0"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        check_drafter(Settings(model="/models/x", **settings))


def test_mtp_needs_layers_that_predict_further_tokens(tmp_path: Path) -> None:
    """Before vLLM looks at the checkpoint."""
    LlamaConfig(architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    settings = Settings(
        model=str(tmp_path),
        data_dir=str(tmp_path / "data"),
        drafter="mtp",
        speculative_tokens=1,
        vllm=VllmOptions(dtype="float32"),
    )
    with pytest.raises(
        SettingsError, match=r"config.json has no MTP layers \(num_nextn_predict_layers, "
    ):
        asyncio.run(VllmEngine(settings).start())
    for said in ({"num_nextn_predict_layers": 1}, {"text_config": {"mtp_num_hidden_layers": 1}}):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | said))
        check_drafter(settings)


def test_drafts_that_a_checkpoint_brings_by_itself_are_refused() -> None:
    """vLLM serves a head in the `speculators` format as the model that it is of, with drafts."""
    brought: Any = SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=5))
    with pytest.raises(
        SettingsError, match="5 drafts for this checkpoint, but speculative_tokens is 0"
    ):
        check_drafts(brought, Settings())
    check_drafts(brought, Settings(speculative_tokens=5))
    check_drafts(SimpleNamespace(speculative_config=None), Settings())  # type: ignore[arg-type]


def test_settings_become_vllms_options_without_overlapping_steps() -> None:
    assert "speculative_config" not in engine_options(Settings(model="/m"))
    for settings, method in (
        (
            Settings(model="/m", speculative_tokens=2),
            {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2},
        ),
        (
            Settings(model="/m", speculative_tokens=2, drafter="eagle3", draft_model="/h"),
            {"method": "eagle3", "model": "/h"},
        ),
        (Settings(model="/m", speculative_tokens=2, drafter="mtp"), {"method": "mtp"}),
    ):
        options = engine_options(settings)
        assert (
            options["speculative_config"]
            == speculative_config(settings)
            == {"num_speculative_tokens": 2} | method
        )
        assert options["async_scheduling"] is False
