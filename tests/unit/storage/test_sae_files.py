"""A sparse autoencoder that does not fit the model, or that sae-lens would compute otherwise, is
refused by name.
"""

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusal_kit import refuses
from sae_rows import D_IN, D_SAE, LAYER, ROOT
from safetensors.numpy import load_file, save_file

from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.prompts.selectors import HOOKS
from midstream.storage.formats.sae_files import SaeError, check_on, folder_of, reading, size_of

MODEL: dict[str, Any] = {"hooks": list(HOOKS), "num_layers": 4, "hidden_size": D_IN}


def changed(
    folder: Path,
    form: str = "standard",
    drop: str = "",
    metadata: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    """A copy of a fixture with other members of its config."""
    shutil.copytree(ROOT / form, folder)
    members = json.loads((folder / "cfg.json").read_text()) | config
    members.pop(drop, None)
    if metadata:
        members["metadata"] |= metadata
    (folder / "cfg.json").write_text(json.dumps(members))
    return folder


def with_tensors(
    folder: Path, form: str = "standard", drop: str = "", **tensors: np.ndarray
) -> Path:
    changed(folder, form)
    found = load_file(folder / "sae_weights.safetensors") | tensors
    found.pop(drop, None)
    save_file(found, folder / "sae_weights.safetensors")
    return folder


@pytest.mark.parametrize(
    "name",
    ["standard", "bare", "jumprelu", "gated", "topk", "rescaled", "layer_norm", "constant_norm"],
)
def test_every_form_of_saelens_is_registered_at_its_hook_and_layer(name: str) -> None:
    found = check_on(ROOT / name, None, None, **MODEL)
    assert found.hook == "post_block"
    assert found.layer == LAYER
    assert found.content.trained_on == "tiny"
    assert found.content.form.d_in == D_IN
    assert found.content.form.d_sae == D_SAE
    assert size_of(found.content.form) == sum(
        tensor.nbytes for tensor in load_file(ROOT / name / "sae_weights.safetensors").values()
    )


def test_the_flat_config_before_version_6_is_read() -> None:
    found = check_on(ROOT / "flat", None, None, **MODEL)
    assert found.hook == "pre_attn"
    assert found.layer == LAYER
    assert found.content.form.architecture == "topk"
    assert found.content.form.k == 4


def test_gemma_scope_needs_hook_and_layer() -> None:
    found = check_on(ROOT / "gemma_scope", "mlp_out", 3, **MODEL)
    assert found.hook == "mlp_out"
    assert found.layer == 3
    assert found.content.form.architecture == "jumprelu"
    assert not found.content.form.apply_b_dec_to_input
    for hook, layer, field in (("mlp_out", None, "layer"), (None, 3, "hook")):
        with refuses("is required: params", field=field):
            check_on(ROOT / "gemma_scope", hook, layer, **MODEL)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("made", "change", "says"),
    [
        *(
            (changed, change, says)
            for change, says in (
                (
                    {"architecture": "transcoder"},
                    "architecture is 'transcoder'; valid: standard, jumprelu, gated, topk",
                ),
                (
                    {"architecture": "jumprelu"},
                    "has no tensor threshold; jumprelu has W_enc, W_dec, b_dec, b_enc, threshold",
                ),
                (
                    {"form": "jumprelu", "architecture": "standard"},
                    "the tensor 'threshold' is not served",
                ),
                ({"d_in": 16}, "W_enc has the shape [8, 32]; d_in 16 and d_sae 32 need [16, 32]"),
                ({"d_sae": 0}, "d_sae is 0; valid: a positive integer"),
                ({"d_sae": 1 << 22}, "the limit is 2097152"),
                ({"form": "topk", "k": 33}, "k is 33; valid: a whole number, 1 to 32"),
                ({"form": "topk", "k": "16"}, "k is '16'; valid: a whole number, 1 to 32"),
                ({"form": "topk", "k": None}, "k is None"),
                (
                    {"normalize_activations": "expected_average_only_in"},
                    "others need statistics of the data",
                ),
                ({"normalize_activations": True}, "others need statistics of the data"),
                (
                    {"apply_b_dec_to_input": "yes"},
                    "apply_b_dec_to_input is 'yes'; valid: true or false",
                ),
                ({"rescale_acts_by_decoder_norm": True}, "valid: false for standard"),
                ({"reshape_activations": "hook_z"}, "reshape_activations is 'hook_z'; valid: none"),
                ({"finetuning_scaling_factor": True}, "valid: false"),
                (
                    {"activation_fn_str": "tanh-relu"},
                    "activation_fn is 'tanh-relu'; valid: relu, topk",
                ),
                ({"of_a_later_sae_lens": 1}, "of_a_later_sae_lens is '1', which is not served"),
                (
                    {"metadata": {"hook_name": "blocks.1.attn.hook_z"}},
                    "hook_name is 'blocks.1.attn.hook_z'; valid: blocks.<layer>.hook_resid_pre",
                ),
                ({"metadata": {"hook_layer": 2}}, "hook_layer is 2; valid: 1, as hook_name says"),
                ({"metadata": {"hook_head_index": 0}}, "an SAE of all heads"),
                (
                    {"metadata": {"hook_name_out": "blocks.1.hook_mlp_out"}},
                    "hook_name_out is 'blocks.1.hook_mlp_out'; valid: blocks.1.hook_resid_post, wh",
                ),
                (
                    {
                        "metadata": {
                            "model_from_pretrained_kwargs": {"center_writing_weights": True}
                        }
                    },
                    "no centred or folded weights",
                ),
            )
        ),
        *(
            (with_tensors, change, says)
            for change, says in (
                ({"drop": "b_enc"}, "has no tensor b_enc"),
                (
                    {"W_dec": np.ones((D_IN, D_SAE), np.float32)},
                    "W_dec has the shape [8, 32]; d_in 8 and d_sae 32 need [32, 8]",
                ),
                (
                    {"b_enc": np.full(D_SAE, np.nan, np.float32)},
                    "b_enc has 32 numbers that are not finite, of 32",
                ),
                (
                    {"W_enc": np.ones((D_IN, D_SAE), np.float64)},
                    "W_enc is F64; valid: F32, F16, BF16",
                ),
                (
                    {"scaling_factor": np.full(D_SAE, 2, np.float32)},
                    "the tensor 'scaling_factor' is not served",
                ),
                ({"b_gate": np.ones(D_SAE, np.float32)}, "the tensor 'b_gate' is not served"),
            )
        ),
    ],
)
def test_a_config_or_tensors_that_are_not_served_are_refused_by_name(
    tmp_path: Path, made: Callable[..., Path], change: dict[str, Any], says: str
) -> None:
    with refuses(says, field="path"):
        check_on(made(tmp_path / "a", **change), None, None, **MODEL)


def test_a_scaling_factor_of_ones_changes_nothing(tmp_path: Path) -> None:
    assert (
        check_on(
            with_tensors(tmp_path / "a", scaling_factor=np.ones(D_SAE, np.float32)),
            None,
            None,
            **MODEL,
        ).layer
        == LAYER
    )


@pytest.mark.parametrize(
    ("asked", "model", "field", "says"),
    [
        (("pre_attn", None), {}, "hook", "is pre_attn, but the SAE was trained on hook post_block"),
        ((None, 2), {}, "layer", "is 2, but the SAE was trained on layer 1"),
        (
            (None, None),
            {"hooks": ["mlp_out"]},
            "hook",
            "autoencoders of post_block are not served on this model",
        ),
        ((None, None), {"num_layers": 1}, "layer", "this model has no layer 1"),
        (
            (None, None),
            {"hidden_size": 16},
            "path",
            "d_in is 8: the SAE was trained on another model",
        ),
    ],
)
def test_an_autoencoder_of_another_place_or_model_is_refused_by_field(
    asked: Any, model: dict[str, Any], field: str, says: str
) -> None:
    with refuses(says, kind="invalid_request", field=field) as refused:
        check_on(ROOT / "standard", *asked, **(MODEL | model))
    assert refused.value.allowed


def test_the_digest_covers_config_and_weights(tmp_path: Path) -> None:
    folders = [
        changed(tmp_path / "a"),
        changed(tmp_path / "b", apply_b_dec_to_input=False),
        with_tensors(tmp_path / "c", b_enc=np.ones(D_SAE, np.float32)),
    ]
    digests = []
    for folder in folders:
        with reading(folder) as (content, _):
            digests.append(content.digest)
    assert len(set(digests)) == len(folders)


def test_files_that_change_while_they_are_read_are_refused(tmp_path: Path) -> None:
    folder = changed(tmp_path / "a")
    with pytest.raises(SaeError, match="has changed while it was read"), reading(folder):
        (folder / "sae_weights.safetensors").write_bytes(b"\0" * 100)


@pytest.mark.parametrize(
    "raw",
    [b"", b"\xff" * 8, (2**40).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") + b"[]"],
)
@pytest.mark.parametrize("form", ["standard", "gemma_scope"])
def test_files_that_are_no_tensors_are_refused(tmp_path: Path, form: str, raw: bytes) -> None:
    shutil.copytree(ROOT / form, tmp_path / "a")
    (
        tmp_path / "a" / ("params.npz" if form == "gemma_scope" else "sae_weights.safetensors")
    ).write_bytes(raw)
    with pytest.raises(MidstreamError, match=r"safetensors|npz"):
        check_on(tmp_path / "a", "post_block", 1, **MODEL)


@pytest.mark.parametrize(
    "bad",
    [
        np.array([{}], dtype=object),
        np.ones((D_IN, D_SAE), np.int32),
        np.asfortranarray(np.ones((D_IN, D_SAE))),
    ],
)
def test_an_npz_with_objects_or_integers_is_refused_and_runs_nothing(
    tmp_path: Path, bad: np.ndarray
) -> None:
    np.savez(tmp_path / "params.npz", W_enc=bad)
    with pytest.raises(MidstreamError, match="valid: float16, float32 or float64"):
        check_on(tmp_path, "post_block", 1, **MODEL)


def test_an_npz_that_unpacks_to_more_than_the_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midstream.storage.formats.sae_files.MAX_SAE_BYTES", 10_000)
    with zipfile.ZipFile(tmp_path / "params.npz", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("W_enc.npy", b"\0" * 1_000_000)
    with pytest.raises(MidstreamError, match="more than 10000 bytes unpacked"):
        check_on(tmp_path, "post_block", 1, **MODEL)


def test_only_folders_below_the_allowed_one_are_taken(tmp_path: Path) -> None:
    """Which paths are refused is told by test_lora_files.py."""
    inside = changed(tmp_path / "deep" / "a")
    shutil.copytree(ROOT / "gemma_scope", tmp_path / "scope")
    assert folder_of(str(tmp_path), "deep/a") == inside
    assert folder_of(str(tmp_path), "scope").name == "scope"
