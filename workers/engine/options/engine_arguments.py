"""Translates settings to vLLM's engine arguments."""

import operator
import os
from pathlib import Path
from typing import Any

import msgspec
from vllm.config import VllmConfig
from vllm.model_executor.models import registry
from vllm.platforms import current_platform

from ....broker.processes.private_files import private_folder
from ....schemas.base.records import to_json
from ....schemas.settings.settings import Settings
from ...runner.support.quantisation import W4A8
from .. import no_torchvision
from ..dtype import Choice, choose
from .drafts import checkpoint_config, speculative_config
from .option_check import accepted

#: Tokens in a block of the KV cache. With vLLM's 128, prompts of one sentence share no block; 32 is
#: the least that its CPU kernels take, and as fast (measured with prompts of 300 tokens, and while
#: 16 requests generate).
_CPU_BLOCK = 32
#: On two cores, ordinary requests and sweeps were faster with both; more cores were not measured.
FEW_CORES = 2


def engine_options(settings: Settings) -> dict[str, Any]:
    """Returns vLLM's arguments from the settings, without Midstream's additions: a stock engine
    with these arguments is the baseline of comparisons.

    Raises SettingsError for refused options in `settings.engine_options`.
    """
    settings = for_platform(settings)
    options: dict[str, Any] = {
        "model": settings.model,
        "served_model_name": settings.served_model,
        **msgspec.structs.asdict(settings.vllm),
        "enable_lora": settings.vllm.max_loras > 0,  # if not, vLLM reads none of the sizes
        "disable_log_stats": True,
        # models that take text only ignore this option and the next two
        "language_model_only": not settings.images_per_prompt,
        "limit_mm_per_prompt": {"image": settings.images_per_prompt, "video": 0, "audio": 0},
        # the cache's two halves rely on requests being submitted in the order of their processing
        "mm_processor_cache_gb": 0,
        # With `auto` the first request would choose the backend for all later ones, whose texts
        # would then depend on it.
        "structured_outputs_config": {"backend": "xgrammar"},
        # sampling comes from the job, never from a file next to the weights
        "generation_config": "vllm",
    }
    if settings.executor != "auto":
        options["distributed_executor_backend"] = settings.executor
    if settings.speculative_tokens:
        # A rank knows a token's position before the forward pass only if no step begins before the
        # drafts of the last step are verified.
        options |= {"speculative_config": speculative_config(settings), "async_scheduling": False}
    if current_platform.is_cpu():
        options["kv_cache_memory_bytes"] = int(settings.kv_cache_gib * (1 << 30))
    return options | accepted(settings).options


def use_all_cores(ranks: int) -> None:
    """On one or two cores, gives the model's threads also the core that vLLM reserves for a
    spinning scheduler.

    Midstream's scheduler sleeps (`runner/vllm/idle_sleep.py`). With more cores, leaving one to all
    other processes costs less than their interruptions. The threads of a single rank are not bound
    to cores, so that a thread that waits for one core can take the other when it is free.
    """
    few = current_platform.is_cpu() and len(os.sched_getaffinity(0)) <= FEW_CORES
    if few and "VLLM_CPU_NUM_OF_RESERVED_CPU" not in os.environ:  # keep an operator's choice
        os.environ["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "0"
        if ranks == 1:
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def for_platform(settings: Settings) -> Settings:
    """Return the settings with the platform's choice where they leave one open: the dtype, graphs
    on an accelerator and none on the CPU, and on the CPU the tokens of a block.
    """
    on_cpu = current_platform.is_cpu()
    own = settings.vllm
    chosen = msgspec.structs.replace(
        own,
        dtype=dtype_of(settings).dtype,
        enforce_eager=on_cpu if own.enforce_eager is None else own.enforce_eager,
        block_size=own.block_size or (_CPU_BLOCK if on_cpu else None),
    )
    return msgspec.structs.replace(settings, vllm=chosen)


def dtype_of(settings: Settings) -> Choice:
    """Return the dtype that the engine computes in, and why."""
    config = checkpoint_config(settings.model) if settings.vllm.dtype == "auto" else {}
    return choose(settings.vllm.dtype, config, gpu=not current_platform.is_cpu())


def scheduler_class(config: VllmConfig) -> str:
    """Returns Midstream's scheduler class for a config that vLLM has completed: the asynchronous
    class if vLLM finds that executor, runner and drafts allow it.

    vLLM's CPU platform never overlaps steps. With one stage and no drafts it still runs the
    asynchronous class, as accelerators do, but step by step.
    """
    # Overlap changes nothing for ranks, even with `stages + 1` steps under way: each gets the steps
    # in order, and what a step carries takes effect after the steps before it.
    overlaps = (
        config.parallel_config.pipeline_parallel_size == 1 and config.speculative_config is None
        if current_platform.is_cpu()
        else config.scheduler_config.async_scheduling
    )
    name = "MidstreamAsyncScheduler" if overlaps else "MidstreamScheduler"
    return f"midstream.workers.runner.vllm.scheduler.{name}"


def prepare_environment(settings: Settings) -> None:
    """Sets the environment variables that vLLM reads, before its processes start."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    no_torchvision.stand_in()
    # no 8-bit activations with 4-bit weights: the checkpoint does not define them
    os.environ.setdefault(W4A8, "0")
    if settings.log_format == "json":
        os.environ["VLLM_LOGGING_CONFIG_PATH"] = _logging_config(settings)
    if current_platform.is_cpu():
        # a process of its own, which keeps CUDA out of this one, would import everything again
        registry._run_in_subprocess = operator.call
    runner = settings.runner
    if runner == "auto" and current_platform.is_cpu():
        runner = "v1"  # the v2 runner needs Triton, which has no CPU backend
    if runner != "auto":
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if runner == "v2" else "0"
    ranks = settings.vllm.ranks
    if current_platform.is_cpu() and ranks > 1 and "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:
        cores = sorted(os.sched_getaffinity(0))
        share = max(1, len(cores) // ranks)
        groups = [
            cores[rank * share : (rank + 1) * share] or [cores[rank % len(cores)]]
            for rank in range(ranks)
        ]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(
            ",".join(map(str, group)) for group in groups
        )


def _logging_config(settings: Settings) -> str:
    """Writes a logging configuration with which every process of vLLM logs JSON as Midstream does;
    returns its path.
    """
    formatter = {
        "()": "midstream.broker.telemetry.logs.JsonFormatter",
        "process": "engine",
        "worker": settings.worker_id,
    }
    config = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"json": formatter},
        "handlers": {
            "stderr": {
                "class": "logging.StreamHandler",
                "formatter": "json",
                "stream": "ext://sys.stderr",
            }
        },
        "root": {"handlers": ["stderr"], "level": settings.log_level},
    }
    path = (
        private_folder(Path(settings.data_dir).resolve() / "logs")
        / f"vllm-{settings.worker_id}.json"
    )
    path.write_bytes(to_json(config))
    return str(path)
