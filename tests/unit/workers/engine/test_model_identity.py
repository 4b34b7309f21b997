"""The identity of a model follows what decides its numbers, and nothing else; a checkpoint is read
once.
"""

import json
import os
import shutil
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from refusal_kit import refuses
from vllm.engine.arg_utils import AsyncEngineArgs

from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.settings.settings import load_settings
from midstream.schemas.settings.vllm_options import VllmOptions
from midstream.workers.engine import model_identity
from midstream.workers.engine.model_identity import FileDigests, identity_of
from midstream.workers.engine.options.option_lists import OURS, SERVING, WRONG

LONG_AGO = 1_000_000_000


class Bench:
    """A checkpoint, and the settings of a worker that serves it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.model = self.checkpoint("model")

    def checkpoint(self, name: str, **changed: bytes) -> Path:
        path = self.folder / name
        path.mkdir()
        files = {
            "config.json": b"{}",
            "model.safetensors": b"weights",
            "tokenizer.json": b"tokens",
            "README.md": b"about",
        }
        files |= {file.replace("_", "."): content for file, content in changed.items()}
        for file, content in files.items():
            (path / file).write_bytes(content)
            os.utime(path / file, (LONG_AGO, LONG_AGO))
        return path

    def identity(
        self,
        model: Path | str = "",
        dtype: str = "bfloat16",
        tokenizer: Path | str = "",
        auto_map: dict[str, str] | None = None,
        rope: dict[str, Any] | None = None,
        max_model_len: int = 64,
        **changed: Any,
    ) -> str:
        place = str(model or self.model)
        config = SimpleNamespace(
            model=place,
            tokenizer=str(tokenizer or place),
            dtype=f"torch.{dtype}",
            hf_config=SimpleNamespace(_commit_hash=None, auto_map=auto_map),
            hf_text_config=SimpleNamespace(rope_parameters=rope),
            max_model_len=max_model_len,
            trust_remote_code=auto_map is not None,
        )
        return identity_of(load_settings({}, data_dir=str(self.data), **changed), config)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_copy_in_another_folder_has_the_same_identity(bench: Bench) -> None:
    copy = bench.folder / "copy"
    shutil.copytree(bench.model, copy)
    (copy / "README.md").write_text("other words")
    (copy / ".cache").mkdir()
    assert bench.identity(copy) == bench.identity()
    assert len(bench.identity()) == 64


@pytest.mark.parametrize(
    "file", ["config_json", "model_safetensors", "tokenizer_json", "model-00002_safetensors"]
)
def test_a_changed_or_further_file_is_another_identity(bench: Bench, file: str) -> None:
    assert bench.identity(bench.checkpoint("other", **{file: b"changed"})) != bench.identity()


def test_dtype_and_options_that_change_numbers_belong_to_the_identity(bench: Bench) -> None:
    changed: list[dict[str, Any]] = [
        {"quantization": "fp8"},
        {"hf_overrides": {"rope_theta": 2.0}},
        {"code_revision": "0123abc"},
        {"tokenizer_revision": "0123abc"},
    ]
    identities = [bench.identity(), bench.identity(dtype="float32")]
    identities += [bench.identity(engine_options=options) for options in changed]
    assert len(set(identities)) == 6


#: Options that only vLLM reads, and that an engine starts with.
STARTS = (
    {field.name for field in fields(AsyncEngineArgs)}
    - {field.name for field in msgspec.structs.fields(VllmOptions)}
    - OURS.keys()
    - WRONG.keys()
)
COMPUTING = sorted(STARTS - SERVING)


@pytest.mark.parametrize("option", COMPUTING)
def test_every_option_counts_that_may_change_numbers(bench: Bench, option: str) -> None:
    changed = str(bench.checkpoint("other"))
    assert bench.identity(engine_options={option: changed}) != bench.identity()


@pytest.mark.parametrize(
    "option", ["mm_processor_kwargs", "model_impl", "ignore_patterns", "mm_encoder_attn_dtype"]
)
def test_what_changes_an_images_rows_or_the_weights_counts(option: str) -> None:
    assert option in COMPUTING


@pytest.mark.parametrize("option", sorted(SERVING))
def test_what_does_not_count_is_an_option_that_an_engine_starts_with(option: str) -> None:
    assert option in STARTS


@pytest.mark.parametrize(
    "changed",
    [
        {"engine.tensor_parallel_size": 2},
        {"engine.pipeline_parallel_size": 2},
        {"engine.max_num_seqs": 7},
        {"engine_options": {"gpu_memory_utilization": 0.5}},
    ],
)
def test_how_a_model_is_served_is_not_its_identity(bench: Bench, changed: dict[str, Any]) -> None:
    assert bench.identity(**changed) == bench.identity()


def test_the_factors_of_longrope_belong_to_the_identity(bench: Bench) -> None:
    """vLLM uses the long ones for all prompts where its longest prompt needs them."""
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 64, "long_factor": [4.0]}
    short, still, long, longer = (
        bench.identity(rope=rope, max_model_len=tokens) for tokens in (32, 64, 65, 128)
    )
    assert short == still == bench.identity(max_model_len=65), "as it was for other models"
    assert long == longer != short


@pytest.mark.parametrize(("load_format", "same"), [("safetensors", True), ("dummy", False)])
def test_only_weights_of_the_checkpoint_have_its_identity(
    bench: Bench, load_format: str, same: bool
) -> None:
    assert (bench.identity(engine_options={"load_format": load_format}) == bench.identity()) == same


def test_a_tokenizer_elsewhere_belongs_to_the_identity(bench: Bench) -> None:
    first = bench.checkpoint("first")
    second = bench.checkpoint("second", tokenizer_json=b"others")
    assert (
        len({bench.identity(), bench.identity(tokenizer=first), bench.identity(tokenizer=second)})
        == 3
    )


def test_every_byte_of_a_large_file_counts(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_identity, "_PIECE", 64)
    weights = bytearray(1000)
    identities = {bench.identity(bench.checkpoint("zeros", model_safetensors=bytes(weights)))}
    for place in (0, 63, 64, 500, 999):
        changed = bytearray(weights)
        changed[place] = 1
        identities.add(
            bench.identity(bench.checkpoint(f"one{place}", model_safetensors=bytes(changed)))
        )
    assert len(identities) == 6


def test_a_file_is_read_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_identity, "_FRESH_S", -1e9)
    first = bench.identity()
    with monkeypatch.context() as patch:
        patch.setattr(model_identity, "_piece", lambda *_: pytest.fail("it was read again"))
        assert bench.identity() == first
    weights = bench.model / "model.safetensors"
    former = weights.stat()
    weights.write_bytes(b"WEIGHTS")
    # same size and time of modification
    os.utime(weights, ns=(former.st_atime_ns, former.st_mtime_ns))
    assert bench.identity() != first


def test_a_file_that_was_just_written_is_not_remembered(bench: Bench) -> None:
    (bench.model / "config.json").write_text("{ }")
    bench.identity()
    known = bench.data / "checkpoint-digests.json"
    assert not known.exists() or str(bench.model / "config.json") not in json.loads(
        known.read_bytes()
    )


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"a": 1}', b"\xff"])
def test_a_damaged_file_of_digests_is_ignored(bench: Bench, content: bytes) -> None:
    first = bench.identity()
    bench.data.mkdir(exist_ok=True)
    (bench.data / "checkpoint-digests.json").write_bytes(content)
    assert bench.identity() == first


def test_a_name_on_the_hub_needs_a_commit(bench: Bench) -> None:
    with pytest.raises(MidstreamError, match="the identity of some/model is unknown"):
        bench.identity("some/model")


@pytest.mark.parametrize("file", ["layers/mixer.py", "additional_chat_templates/tools.jinja"])
def test_code_and_templates_in_subfolders_belong_to_the_identity(bench: Bench, file: str) -> None:
    first = bench.identity()
    path = bench.model / file
    path.parent.mkdir()
    path.write_text("SCALE = 2")
    assert bench.identity() != first


def test_code_of_another_repository_needs_a_commit(bench: Bench) -> None:
    elsewhere = {"AutoModelForCausalLM": "some/model--modeling.Model"}
    with refuses(match="code from another repository", field="model") as refused:
        bench.identity(auto_map=elsewhere)
    assert "code_revision" in str(refused.value.allowed)
    assert bench.identity(auto_map=elsewhere, engine_options={"code_revision": "0123abc"})
    assert bench.identity(auto_map={"AutoConfig": "configuration.Config"})


def test_files_that_cannot_be_read_are_an_error(bench: Bench) -> None:
    (bench.model / "model.safetensors").unlink()
    (bench.model / "model.safetensors").symlink_to(bench.folder / "nowhere")
    assert bench.identity() != bench.identity(bench.checkpoint("other")), (
        "a broken link is no file: the engine reports it"
    )
    with pytest.raises(MidstreamError, match="cannot be read"):
        FileDigests(bench.data / "x.json").of(bench.folder / "gone")
