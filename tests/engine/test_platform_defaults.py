"""What the settings leave open is chosen by the platform; what they say holds on each."""

import os
from typing import Any

import pytest

from midstream.schemas.settings.settings import Settings, load_settings, to_environment
from midstream.schemas.settings.vllm_options import VllmOptions


class Platform:
    """As much of vLLM's platform as the options read."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def is_cpu(self) -> bool:
        return self._kind == "cpu"


def options(monkeypatch: pytest.MonkeyPatch, kind: str, settings: Settings) -> dict[str, Any]:
    """vLLM's engine arguments on that platform, and the environment that its processes get."""
    from midstream.workers.engine.options import engine_arguments as vllm_options

    monkeypatch.setattr(vllm_options, "current_platform", Platform(kind))
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "")  # so that it is put back
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    vllm_options.prepare_environment(settings)
    return vllm_options.engine_options(settings)


@pytest.mark.parametrize(
    ("kind", "given", "eager"),
    [
        ("cuda", None, False),
        ("cpu", None, True),
        ("cuda", True, True),
        ("cuda", False, False),
        ("cpu", False, False),
    ],
)
def test_a_gpu_runs_graphs_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, kind: str, given: bool | None, eager: bool
) -> None:
    found = options(monkeypatch, kind, Settings(model="m", vllm=VllmOptions(enforce_eager=given)))
    assert found["enforce_eager"] is eager


def test_the_engine_holds_the_platforms_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether forwards enter at a layer, and how captured rows are buffered, follow from what vLLM
    is given.
    """
    from midstream.workers.engine.options import engine_arguments as vllm_options
    from midstream.workers.engine.vllm import VllmEngine

    monkeypatch.setattr(vllm_options, "current_platform", Platform("cuda"))
    assert VllmEngine(Settings(model="m"))._settings.vllm.enforce_eager is False


def test_on_a_gpu_vllm_chooses_runner_blocks_cache_and_overlap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = options(monkeypatch, "cuda", Settings(model="m"))
    assert "VLLM_USE_V2_MODEL_RUNNER" not in os.environ
    assert found["block_size"] is None
    assert not {
        "kv_cache_memory_bytes",
        "attention_config",
        "async_scheduling",
    } & set(found)


@pytest.mark.parametrize(
    ("kind", "cores", "ranks", "given", "reserved", "bound"),
    [
        ("cpu", 1, 1, (None, None), "0", "nobind"),
        ("cpu", 2, 1, (None, None), "0", "nobind"),
        ("cpu", 2, 2, (None, None), "0", None),
        ("cpu", 2, 1, ("1", None), "1", None),
        ("cpu", 2, 1, (None, "1"), "0", "1"),
        ("cpu", 3, 1, (None, None), None, None),
        ("cuda", 2, 1, (None, None), None, None),
    ],
)
def test_a_small_machine_gives_the_model_all_cores(
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    cores: int,
    ranks: int,
    given: tuple[str | None, str | None],
    reserved: str | None,
    bound: str | None,
) -> None:
    from midstream.workers.engine.options import engine_arguments as vllm_options

    names = ("VLLM_CPU_NUM_OF_RESERVED_CPU", "VLLM_CPU_OMP_THREADS_BIND")
    for name, value in zip(names, given, strict=True):
        monkeypatch.setenv(name, value or "")  # so that it is put back
        if value is None:
            monkeypatch.delenv(name)
    monkeypatch.setattr(vllm_options, "current_platform", Platform(kind))
    monkeypatch.setattr(vllm_options.os, "sched_getaffinity", lambda _: set(range(cores)))
    vllm_options.use_all_cores(ranks)
    assert [os.environ.get(name) for name in names] == [reserved, bound]


def test_on_the_cpu_the_runner_is_v1_and_the_cache_as_set(monkeypatch: pytest.MonkeyPatch) -> None:
    found = options(monkeypatch, "cpu", Settings(model="m"))
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert found["block_size"] == 32
    assert found["kv_cache_memory_bytes"] == 1 << 30


def test_text_of_the_environment_sets_it_and_children_read_it_back() -> None:
    assert load_settings({}).vllm.enforce_eager is None
    for text, value in (("true", True), ("0", False)):
        settings = load_settings({"MIDSTREAM_ENGINE_ENFORCE_EAGER": text})
        assert settings.vllm.enforce_eager is value
        assert load_settings(to_environment(settings)).vllm.enforce_eager is value
