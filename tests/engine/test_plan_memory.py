"""A rank's buffers take the memory that the plan says."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tree import ROOT

from midstream.schemas.settings.settings import Settings
from midstream.schemas.settings.tuning import Tuning
from midstream.schemas.settings.vllm_options import VllmOptions
from midstream.workers.demo_model import fetch_demo_model
from midstream.workers.engine.dtype import choose
from midstream.workers.engine.plan import model_of, plan

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
buffers = worker._plane._banks.first.table._buffers
found = {field.name: getattr(buffers, field.name).nbytes for field in dataclasses.fields(buffers)}
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
