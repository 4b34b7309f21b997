"""A rank's buffers take the memory that the plan says, and vLLM's LoRA adapters what it counts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from adapters import LLAMA, make_adapter
from tiny import checkpoint
from tree import ROOT

from midstream.schemas.settings.settings import Settings
from midstream.schemas.settings.tuning import Tuning
from midstream.schemas.settings.vllm_options import VllmOptions
from midstream.workers.engine.dtype import choose
from midstream_ops.demo_model import fetch_demo_model
from midstream_ops.plan import model_of, plan

#: Starts an engine in this process, and prints the bytes of its rank's buffers by name.
PROGRAM = """
import dataclasses, json, sys
sys.path.insert(0, sys.argv[1])
import kit
from direct import Direct
import msgspec
from midstream.schemas.settings.settings import Settings
from midstream.workers.runner.base.config import plane_config
direct = Direct(msgspec.convert(json.loads(sys.argv[2]), Settings), {})
worker = direct.engine._llm.llm.model_executor.driver_worker.worker
buffers = worker._plane.banks.first.table._buffers
found = {field.name: getattr(buffers, field.name).nbytes for field in dataclasses.fields(buffers)}
found["ring"] = 0  # on a CPU it is the arena's address space, whose memory is the queue
print(json.dumps(found | {"queue": plane_config().capture_queue_mib << 20}))
direct.close()
"""


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", pytest.param("demo", marks=pytest.mark.matrix)])
def test_the_ranks_buffers_are_as_large_as_planned(name: str, llama: Path, tmp_path: Path) -> None:
    folder = llama if name == "llama" else fetch_demo_model()
    settings = Settings(
        model=str(folder),
        data_dir=str(tmp_path),
        vllm=VllmOptions(max_model_len=256, max_num_seqs=8, max_num_batched_tokens=128),
        kv_cache_gib=0.1,
        tuning=Tuning(steering_rows=9),
        relay_url="tcp://127.0.0.1:9",
        worker_id="test",
    )
    command = [
        sys.executable,
        "-c",
        PROGRAM,
        str(ROOT / "benchmarks" / "gpu"),
        json.dumps(msgspec.to_builtins(settings)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith('{"ring"')]
    config = json.loads((folder / "config.json").read_text())
    dtype = choose(settings.vllm.dtype, config, gpu=False).dtype
    found = plan(model_of(config, dtype), settings, gpu=False)
    assert json.loads(line) == {
        part.name: part.bytes for part in found.memory if part.name in json.loads(line)
    }
    assert found.model.row_bytes > 0


#: Prints bytes: of what is reserved for a step's adapters, and of one adapter that is loaded.
VLLM = """
import json, sys
import midstream.workers.runner.plane.loras
from vllm import LLM
from vllm.lora.request import LoRARequest
options = json.loads(sys.argv[1])
adapter = options.pop("adapter")
llm = LLM(
    **options, enable_lora=True, enforce_eager=True, max_model_len=64, kv_cache_memory_bytes=1 << 24
)
llm.llm_engine.add_lora(LoRARequest("one", 1, adapter))
worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
manager = worker.worker.model_runner.lora_manager._adapter_manager
reserved = [
    stack
    for module in manager.modules.values()
    for stack in (*module.lora_a_stacked, *module.lora_b_stacked)
]
layers = manager.get_adapter(1).loras.values()
parts = [part for layer in layers for part in (layer.lora_a, layer.lora_b)]
loaded = [each for part in parts for each in (part if isinstance(part, list) else [part])]
print("bytes", json.dumps([sum(each.nbytes for each in part) for part in (reserved, loaded)]))
"""


@pytest.mark.matrix
def test_the_plan_counts_what_vllm_reserves_and_keeps(tmp_path: Path) -> None:
    base = checkpoint("llama", tmp_path / "llama")
    make_adapter(tmp_path, "one", base, (*LLAMA, "k_proj", "up_proj"), rank=8)
    options = {"max_loras": 3, "max_cpu_loras": 5, "max_lora_rank": 8}
    asked = options | {"model": str(base), "adapter": str(tmp_path / "one"), "dtype": "float32"}
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(
        [sys.executable, "-c", VLLM, json.dumps(asked)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    reserved, loaded = json.loads(done.stdout.rpartition("bytes ")[2].splitlines()[0])
    config = json.loads((base / "config.json").read_text())
    found = plan(
        model_of(config, "float32"),
        Settings(vllm=VllmOptions(**options)),
        gpu=False,
    )
    sizes = {part.name: part.bytes for part in found.memory}
    assert sizes["adapters"] == reserved
    assert sizes["loaded adapters"] == 5 * loaded
