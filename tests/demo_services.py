"""Services with the demo model, and environments of other libraries."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from stack import Stack
from tree import ROOT

from midstream_ops.demo_model import fetch_demo_model


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Stack]]:
    """Starts a service with the demo model in float32, with the given settings; it ends with the
    file's tests.
    """
    with ExitStack() as ends:

        def start(**settings: object) -> Stack:
            usual = {
                "engine": "vllm",
                "model": str(fetch_demo_model()),
                "model_name": "demo",
                "engine.dtype": "float32",
                "engine.max_model_len": 512,
                "kv_cache_gib": 0.25,
                "certify": False,
                "lease_s": 60.0,
                "tuning.visibility_timeout_s": 120,
            }
            folder = tmp_path_factory.mktemp("stack")
            stack = Stack(folder, api=True, start_timeout_s=400, **(usual | settings))
            return ends.enter_context(stack)

        yield start


@pytest.fixture(scope="session")
def library() -> Callable[[str], Path]:
    """The Python of `make NAME`'s environment: libraries that want other versions than vLLM. It is
    made once and kept.
    """

    def python(name: str) -> Path:
        command = ["make", f".cache/{name}/.ready"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return ROOT / ".cache" / name / "bin" / "python"

    return python
