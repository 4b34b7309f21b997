"""vLLM's own rules decide whether steps overlap; our scheduler is the one of that kind."""

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import ParallelConfig, SchedulerConfig, VllmConfig, vllm as vllm_config
from vllm.model_executor.models import registry
from vllm.platforms import current_platform

from midstream.schemas.settings.settings import Settings
from midstream.schemas.settings.vllm_options import VllmOptions
from midstream.workers.engine.options import engine_arguments as vllm_options
from midstream.workers.engine.options.engine_arguments import (
    engine_options,
    prepare_environment,
    scheduler_class,
)

ASYNC, SYNC = (
    f"midstream.workers.runner.vllm.scheduler.{name}"
    for name in ("MidstreamAsyncScheduler", "MidstreamScheduler")
)


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A platform that says nothing of scheduling, and has Triton."""
    monkeypatch.setattr(
        type(current_platform), "check_and_update_config", classmethod(lambda *_: None)
    )
    monkeypatch.setattr(vllm_config, "HAS_TRITON", True)
    monkeypatch.setattr(vllm_options, "current_platform", SimpleNamespace(is_cpu=lambda: False))


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize(
    ("runner", "stages", "under_way", "scheduler"),
    [
        ("v1", 1, 2, ASYNC),
        ("v2", 1, 2, ASYNC),
        ("v1", 2, 2, SYNC),
        ("v2", 2, 3, ASYNC),
        ("v2", 4, 5, ASYNC),
    ],
)
def test_steps_overlap_where_vllm_supports_it(
    monkeypatch: pytest.MonkeyPatch, runner: str, stages: int, under_way: int, scheduler: str
) -> None:
    """Stages lost it with the v2 runner, which keeps one step more under way than it has stages."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1" if runner == "v2" else "0")
    options = engine_options(
        Settings(model="/models/x", vllm=VllmOptions(pipeline_parallel_size=stages))
    )
    parallel = ParallelConfig(
        pipeline_parallel_size=options["pipeline_parallel_size"], distributed_executor_backend="mp"
    )
    scheduling = SchedulerConfig.default_factory(async_scheduling=options.get("async_scheduling"))
    made = VllmConfig(parallel_config=parallel, scheduler_config=scheduling)
    assert made.max_concurrent_batches == under_way
    assert scheduler_class(made) == scheduler


@pytest.mark.parametrize(
    ("stages", "drafts", "scheduler"), [(1, False, ASYNC), (2, False, SYNC), (1, True, SYNC)]
)
def test_one_stage_on_a_cpu_runs_the_scheduler_of_accelerators(
    stages: int, drafts: bool, scheduler: str
) -> None:
    made: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=False),
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
        speculative_config=object() if drafts else None,
    )
    assert scheduler_class(made) == scheduler


def test_vllm_starts_no_process_to_look_at_a_model_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It would import vLLM once more. What vLLM has found it keeps: so in a new cache."""
    monkeypatch.setattr(os, "environ", {**os.environ, "VLLM_CACHE_ROOT": str(tmp_path)})
    monkeypatch.setattr(registry, "_run_in_subprocess", registry._run_in_subprocess)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a process"))
    prepare_environment(Settings(model="m"))
    found = registry.ModelRegistry.models["LlamaForCausalLM"].inspect_model_cls()
    assert found.architecture == "LlamaForCausalLM"
