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
from midstream.schemas.base.settings import Settings
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
        dtype="float32",
        max_model_len=64,
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


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_config_that_is_no_json_object_is_refused(llama: Path, tmp_path: Path, text: str) -> None:
    broken = copied(tmp_path, llama)
    (broken / "config.json").write_text(text)
    assert "is not" in refusal(broken, tmp_path).detail


@pytest.mark.parametrize("said", [LAYERS - 1, LAYERS + 1])
def test_a_config_that_lies_about_its_layers_is_refused(
    llama: Path, tmp_path: Path, said: int
) -> None:
    error = refusal(changed(copied(tmp_path, llama), num_hidden_layers=said), tmp_path)
    assert f"the config says {said} layers, and the weights have {LAYERS}" in error.detail


def test_an_override_that_lies_about_the_layers_is_refused_too(llama: Path, tmp_path: Path) -> None:
    assert (
        "the config says 2 layers"
        in refusal(llama, tmp_path, hf_overrides={"num_hidden_layers": 2}).detail
    )


def test_weights_that_cannot_be_read_are_named(llama: Path, tmp_path: Path) -> None:
    broken = copied(tmp_path, llama)
    (broken / "model.safetensors").write_bytes(b"nothing")
    assert f"the weights in {broken} cannot be read" in refusal(broken, tmp_path).detail


def test_remote_code_without_permission_is_refused(llama: Path, tmp_path: Path) -> None:
    error = refusal(remote(tmp_path, llama), tmp_path)
    assert "--engine trust_remote_code=true" in error.detail


def test_remote_code_does_not_run_without_permission(llama: Path, tmp_path: Path) -> None:
    made = remote(tmp_path, llama)
    ran = tmp_path / "ran"
    (made / "configuration_remote.py").write_text(f"open({str(ran)!r}, 'w')\n")
    refusal(made, tmp_path)
    assert not ran.exists()


def test_an_index_of_weights_is_read_in_place_of_the_files(llama: Path, tmp_path: Path) -> None:
    made = copied(tmp_path, llama)
    names = {f"model.layers.{layer}.mlp.up_proj.weight": "a.safetensors" for layer in range(7)}
    (made / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert "the weights have 7 (model.layers.0 to model.layers.6)" in refusal(made, tmp_path).detail


def test_an_option_that_does_not_exist_is_refused(llama: Path, tmp_path: Path) -> None:
    assert (
        "did you mean 'trust_remote_code'?"
        in refusal(llama, tmp_path, trust_remote_cod=True).detail
    )
