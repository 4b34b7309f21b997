"""An adapter that vLLM would apply in part, or not as PEFT does, is refused by name; so is one that
is not where it may be.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusal_kit import refuses
from safetensors.numpy import save_file

from midstream.schemas.artifacts.loras import LoraModule, LoraSupport
from midstream.storage.formats import lora_files
from midstream.storage.formats.lora_files import (
    LoraContent,
    LoraError,
    check,
    folder_of,
    general_name,
    joined,
    read,
)

UP = "model.layers.*.mlp.up_proj"
DOWN = "model.layers.*.mlp.down_proj"
SUPPORT = LoraSupport(
    max_rank=8,
    modules={
        UP: [LoraModule(inputs=4, outputs=6, layers="0-3")],
        DOWN: [LoraModule(inputs=6, outputs=4, layers="0-3")],
    },
)
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 4,
    "target_modules": ["up_proj"],
    "layers_to_transform": [1],
    "bias": "none",
}


def name(module: str = "model.layers.1.mlp.up_proj", side: str = "A") -> str:
    return f"base_model.model.{module}.lora_{side}.weight"


def pair(
    rank: int = 2, inputs: int = 4, outputs: int = 6, module: str = "model.layers.1.mlp.up_proj"
) -> dict[str, np.ndarray]:
    return {
        name(module): np.ones((rank, inputs), np.float32),
        name(module, "B"): np.ones((outputs, rank), np.float32),
    }


def write(folder: Path, tensors: dict[str, np.ndarray] | None = None, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    save_file(pair() if tensors is None else tensors, folder / "adapter_model.safetensors")
    return folder


def test_an_adapter_of_this_model_is_accepted_with_what_it_changes(tmp_path: Path) -> None:
    tensors = pair() | pair(rank=3, inputs=6, outputs=4, module="model.layers.3.mlp.down_proj")
    content = read(
        write(
            tmp_path / "a",
            tensors,
            target_modules=["1.mlp.up_proj", "model.layers.3.mlp.down_proj"],
            rank_pattern={"down_proj": 3},
            alpha_pattern={"mlp.down_proj": 1.5},
            use_rslora=True,
        )
    )
    assert check(content, SUPPORT) == (3, [DOWN, UP])
    assert content.bytes == (tmp_path / "a" / "adapter_model.safetensors").stat().st_size


@pytest.mark.parametrize(
    ("config", "tensors", "says"),
    [
        (
            {"r": 16},
            pair(16),
            "r is 16; the worker accepts at most 8 (setting engine.max_lora_rank)",
        ),
        (
            {"r": 4},
            None,
            (
                "lora_A of model.layers.1.mlp.up_proj has the shape [2, 4]; rank 4 on this "
                "model needs [4, 4]"
            ),
        ),
        (
            {},
            pair(inputs=5),
            (
                "has the shape [2, 5]; rank 2 on this model needs [2, 4]: it was trained on "
                "another base model"
            ),
        ),
        ({}, pair(outputs=12), "lora_B of model.layers.1.mlp.up_proj has the shape [12, 2]"),
        (
            {},
            pair(module="model.layers.4.mlp.up_proj"),
            "this model has no model.layers.4.mlp.up_proj; its layers are 0-3",
        ),
        ({}, pair(module="model.layers.1.mlp.gate_proj"), f"may change; it has {DOWN}, {UP}"),
        ({}, {name(): np.ones((2, 4), np.float32)}, "up_proj has only lora_A"),
        ({}, {}, "has no tensors"),
        (
            {},
            pair() | {"base_model.model.lm_head.weight": np.ones((2, 2), np.float32)},
            "'base_model.model.lm_head.weight' is not served",
        ),
        ({}, {name(): np.ones((2, 4), np.float64)}, "is F64; valid: F32, F16, BF16"),
        ({"peft_type": "LOHA"}, None, "peft_type is 'LOHA'; valid: LORA"),
        ({"r": 0}, None, "r is 0; valid: a positive integer"),
        ({"r": True}, None, "r is True; "),
        ({"lora_alpha": "x"}, None, "lora_alpha is 'x'; valid: a finite number"),
        ({"use_dora": True}, None, "use_dora is 'True', which is not served"),
        ({"modules_to_save": ["lm_head"]}, None, "modules_to_save is"),
        ({"bias": "all"}, None, "bias is 'all'; valid: none"),
        ({"init_lora_weights": "pissa"}, None, "init_lora_weights is 'pissa'"),
        ({"rank_pattern": {"(a+)+b": 2}}, None, "rank_pattern is"),
        ({"of_a_later_peft": {"x": 1}}, None, "of_a_later_peft is"),
        ({"target_modules": None}, None, "target_modules is None; valid: names of modules, a"),
        ({"layers_to_transform": "1"}, None, "layers_to_transform is '1'; valid: numbers"),
        ({"layers_to_transform": [True]}, None, "layers_to_transform is [True]; valid: numbers"),
        ({"layers_pattern": "(a+)+b"}, None, "layers_pattern is '(a+)+b'; valid: names (no"),
        ({"layers_pattern": "h", "layers_to_transform": None}, None, "layers_pattern is 'h'; val"),
        ({"target_modules": ".*up_proj"}, None, "layers_to_transform is [1]; valid: null, un"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], tensors: Any, says: str
) -> None:
    folder = write(tmp_path / "a", tensors, **config)
    with pytest.raises(LoraError) as refused:
        check(read(folder), SUPPORT)
    assert says in str(refused.value)


#: As PEFT itself wrote them: see tools/data/peft_rows.py.
PEFT = Path(__file__).parents[2] / "data" / "peft"
TINY = LoraSupport(
    max_rank=8,
    modules={
        f"model.layers.*.{module}": [LoraModule(inputs=inputs, outputs=outputs, layers="0-3")]
        for module, inputs, outputs in (
            ("self_attn.q_proj", 64, 128),
            ("self_attn.k_proj", 64, 64),
            ("self_attn.v_proj", 64, 64),
            ("self_attn.o_proj", 128, 64),
            ("mlp.gate_proj", 64, 160),
            ("mlp.up_proj", 64, 160),
            ("mlp.down_proj", 160, 64),
        )
    },
)
#: Adapter of PEFT that is refused → the member of its config that says why.
NOT_SERVED = {
    "activated": "alora_invocation_tokens",
    "bias": "lora_bias",
    "dora": "use_dora",
    "kasa": "kasa_config",
    "pissa": "init_lora_weights",
    "qalora": "use_qalora",
    "repeated": "layer_replication",
    "tokens": "trainable_token_indices",
    "whole_norm": "modules_to_save",
}
PLAIN = sorted({folder.name for folder in PEFT.iterdir() if folder.is_dir()} - NOT_SERVED.keys())


@pytest.mark.parametrize("adapter", PLAIN)
def test_an_adapter_that_peft_wrote_is_accepted(adapter: str) -> None:
    check(read(PEFT / adapter), TINY)


@pytest.mark.parametrize(("adapter", "member"), NOT_SERVED.items())
def test_the_member_that_refuses_an_adapter_of_peft_is_named(adapter: str, member: str) -> None:
    with pytest.raises(LoraError, match=rf"adapter_config.json: {member} is "):
        check(read(PEFT / adapter), TINY)


@pytest.mark.parametrize("member", ["corda_config", "eva_config", "loftq_config", "lora_ga_config"])
def test_details_of_an_initialisation_are_ignored(tmp_path: Path, member: str) -> None:
    """PEFT saves those of an initialisation that another member did not choose, too."""
    check(read(write(tmp_path, **{member: {"loftq_bits": 4}})), SUPPORT)


@pytest.mark.parametrize("switch", ["use_new", "new_config"])
def test_a_detail_of_what_is_switched_off_is_ignored(tmp_path: Path, switch: str) -> None:
    check(read(write(tmp_path, new_size=4, **{switch: None})), SUPPORT)


@pytest.mark.parametrize("switch", ["use_new", "new_config"])
def test_what_is_switched_on_is_refused_by_its_switch(tmp_path: Path, switch: str) -> None:
    with pytest.raises(LoraError, match=rf"{switch} is 'True', which is not served"):
        check(read(write(tmp_path, new_size=4, **{switch: True})), SUPPORT)


def test_a_detail_without_a_switch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoraError, match="new_size is '4', which is not served"):
        check(read(write(tmp_path, new_size=4)), SUPPORT)


UPS, DOWNS = ([f"model.layers.{n}.mlp.{part}_proj" for n in range(4)] for part in ("up", "down"))


@pytest.mark.parametrize(
    ("config", "adapts"),
    [
        ({}, UPS),
        ({"target_modules": "all-linear"}, UPS + DOWNS),
        ({"target_modules": "ALL-linear", "exclude_modules": ["down_proj"]}, UPS),
        ({"target_modules": r"model\.layers\.\d+\.mlp\.(up|gate)_proj"}, UPS),
        ({"target_modules": r"(.*?[02].*?proj)|x"}, UPS[::2] + DOWNS[::2]),
        ({"target_modules": ["proj", "mlp.down_proj"]}, DOWNS),
        ({"exclude_modules": ".*[01].*"}, UPS[2:]),
        ({"exclude_modules": ["3.mlp.up_proj"], "layers_to_transform": []}, UPS[:3]),
        ({"layers_to_transform": 2}, UPS[2:3]),
        ({"layers_to_transform": [0, 3, 9], "layers_pattern": "layers"}, UPS[::3]),
        ({"layers_to_transform": [0, 3], "layers_pattern": ["h", "layers"]}, UPS[::3]),
        ({"layers_to_transform": [0], "layers_pattern": "h"}, []),
        ({"target_modules": ["up_proj", DOWNS[2]], "layers_to_transform": [1]}, [UPS[1], DOWNS[2]]),
    ],
)
def test_the_tensors_are_those_that_peft_adapts(
    tmp_path: Path, config: dict[str, Any], adapts: list[str]
) -> None:
    """One module less is refused, and each one more, by the member that leaves it out."""

    def written(modules: list[str]) -> LoraContent:
        tensors = [pair(2, *((4, 6) if "up" in each else (6, 4)), module=each) for each in modules]
        merged = {name: tensor for each in tensors for name, tensor in each.items()}
        return read(write(tmp_path / "a", merged, **{"layers_to_transform": None} | config))

    if adapts:
        check(written(adapts), SUPPORT)
        with pytest.raises(LoraError, match=rf"no tensors( of {min(adapts)}, which |\Z)"):
            check(written(sorted(adapts)[1:]), SUPPORT)
    for more in {*UPS, *DOWNS} - {*adapts}:
        with pytest.raises(
            LoraError, match=rf"(target|exclude|layers).* ignore the tensors of {more}"
        ):
            check(written([*adapts, more]), SUPPORT)


def test_an_expression_that_does_not_end_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora_files, "_MATCH_S", 0.5)
    for expression in ("([a-z.0-9_]+)+!", "("):
        folder = write(tmp_path / "a", target_modules=expression, layers_to_transform=None)
        with pytest.raises(LoraError, match=r"target_modules .* a regular expression that is"):
            check(read(folder), SUPPORT)


def test_the_digest_covers_both_files(tmp_path: Path) -> None:
    first, other, alpha = (
        read(write(tmp_path / each, **changes))
        for each, changes in (("a", {}), ("b", {}), ("c", {"lora_alpha": 5}))
    )
    assert first.digest == other.digest != alpha.digest
    assert (
        read(write(tmp_path / "d", {key: 2 * value for key, value in pair().items()})).digest
        != first.digest
    )


def test_only_folders_below_the_allowed_one_are_taken(tmp_path: Path) -> None:
    inside = write(tmp_path / "root" / "deep" / "a")
    outside = write(tmp_path / "elsewhere")
    root = str(tmp_path / "root")
    assert folder_of(root, "deep/a") == inside
    (tmp_path / "root" / "link").symlink_to(outside)
    (tmp_path / "root" / "half").mkdir()
    (tmp_path / "root" / "half" / "adapter_config.json").write_text("{}")
    (tmp_path / "root" / "half" / "adapter_model.safetensors").symlink_to(
        outside / "adapter_model.safetensors"
    )
    for path in (
        "link",
        "half",
        "deep",
        "../elsewhere",
        "deep/../../elsewhere",
        str(inside),
        ".",
        "",
        "missing",
        "a\0b",
    ):
        with refuses(kind="invalid_request", field="path"):
            folder_of(root, path)


def test_names_and_ranges_of_layers_come_together() -> None:
    assert general_name("model.layers.12.mlp.up_proj") == (UP, 12)
    assert general_name("lm_head") == ("lm_head", None)
    stages = [
        [LoraModule(inputs=1, outputs=2, layers="0-1")],
        [LoraModule(inputs=1, outputs=2, layers="2, 3")],
    ]
    assert joined(*stages) == [LoraModule(inputs=1, outputs=2, layers="0-3")]
    assert joined(stages[0], stages[0]) == stages[0], "ranks of one stage have the same layers"
