"""A checkpoint that cannot be served right is refused with what is wrong and what to do, before its
weights are read.
"""

import asyncio
import json
from pathlib import Path

import pytest
from option_cases import changed, copied, remote
from tiny import LAYERS, checkpoint

from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.settings.settings import Settings
from midstream.schemas.settings.vllm_options import VllmOptions
from midstream.workers.engine.vllm import VllmEngine


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it may start: no process, no weights."""

    def started(*_: object, **__: object) -> None:
        raise AssertionError("the engine was started")

    monkeypatch.setattr("vllm.v1.engine.async_llm.AsyncLLM.from_vllm_config", started)


def refusal(model: Path, folder: Path, **options: object) -> MidstreamError:
    settings = Settings(
        model=str(model),
        data_dir=str(folder / "data"),
        vllm=VllmOptions(dtype="float32", max_model_len=64),
        engine_options=options,
    )
    with pytest.raises(MidstreamError) as caught:
        asyncio.run(VllmEngine(settings).start())
    return caught.value


def test_a_checkpoint_without_a_config_is_refused(llama: Path, tmp_path: Path) -> None:
    bare = copied(tmp_path, llama)
    (bare / "config.json").unlink()
    error = refusal(bare, tmp_path)
    assert "has no config.json: `model` is the folder of a checkpoint" in error.detail
    assert error.field == "model"


def test_a_config_that_is_no_json_object_is_refused(llama: Path, tmp_path: Path) -> None:
    broken = copied(tmp_path, llama)
    (broken / "config.json").write_text("[1]")
    assert "is not" in refusal(broken, tmp_path).detail


def test_a_config_that_lies_about_its_layers_is_refused(llama: Path, tmp_path: Path) -> None:
    error = refusal(changed(copied(tmp_path, llama), num_hidden_layers=LAYERS - 1), tmp_path)
    assert f"the config says {LAYERS - 1} layers, and the weights have {LAYERS}" in error.detail


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"hf_overrides": {"num_hidden_layers": 2}}, "the config says 2 layers"),
        ({"trust_remote_cod": True}, "did you mean 'trust_remote_code'?"),
    ],
)
def test_an_option_that_lies_about_the_layers_or_does_not_exist_is_refused(
    llama: Path, tmp_path: Path, options: dict[str, object], said: str
) -> None:
    assert said in refusal(llama, tmp_path, **options).detail


def test_weights_that_cannot_be_read_are_named(llama: Path, tmp_path: Path) -> None:
    broken = copied(tmp_path, llama)
    (broken / "model.safetensors").write_bytes(b"nothing")
    assert f"the weights in {broken} cannot be read" in refusal(broken, tmp_path).detail


@pytest.mark.slow("vLLM and transformers read the checkpoint")
def test_remote_code_is_refused_without_permission_and_does_not_run(
    llama: Path, tmp_path: Path
) -> None:
    made = remote(tmp_path, llama)
    ran = tmp_path / "ran"
    (made / "configuration_remote.py").write_text(f"open({str(ran)!r}, 'w')\n")
    assert "--engine trust_remote_code=true" in refusal(made, tmp_path).detail
    assert not ran.exists()


def test_an_index_of_weights_is_read_in_place_of_the_files(llama: Path, tmp_path: Path) -> None:
    made = copied(tmp_path, llama)
    names = {f"model.layers.{layer}.mlp.up_proj.weight": "a.safetensors" for layer in range(7)}
    (made / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert "the weights have 7 (model.layers.0 to model.layers.6)" in refusal(made, tmp_path).detail


def test_an_error_of_vllm_is_reported_in_one_line_without_its_validators_text(
    llama: Path, tmp_path: Path
) -> None:
    error = refusal(changed(copied(tmp_path, llama), max_position_embeddings=63), tmp_path)
    assert error.kind == "engine_failed"
    assert "max_model_len" in error.detail
    assert "pydantic" not in error.detail
    assert "\n" not in error.detail


def test_an_architecture_that_vllm_does_not_know_is_refused_by_name(
    llama: Path, tmp_path: Path
) -> None:
    shape = {"model_type": "gptj", "n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8}
    unknown = changed(copied(tmp_path, llama), architectures=["NobodysForCausalLM"], **shape)
    assert "NobodysForCausalLM" in refusal(unknown, tmp_path).detail
