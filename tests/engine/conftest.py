"""Engines that tests share: each starts once. An idle engine costs memory only."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from host import Host
from reference import Reference
from tiny import checkpoint

#: Several processes share these tests: each has a core of its own, because vLLM would bind the engines of all to the same one.
if (WORKER := os.environ.get("PYTEST_XDIST_WORKER", "")).startswith("gw"):
    CORES = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {CORES[int(WORKER[2:]) % len(CORES)]})

#: Engines of several ranks wait for one another in loops: on one core, or beside another engine, each waits for the other's time slice.
#: They are marked `ranks`, and run alone.
RANKS = {"tp2", "pp2", "two_ranks"}
#: Engines that several files use start once in all: those files run in one process, one after the other.
ENGINES = {"v1", "cached", "v2", "compiled", "tp2", "pp2"}


def _asked(item: pytest.Item) -> set[str]:
    """Names of the fixtures that a test takes, also of those that its parameters name."""
    named = item.callspec.params.values() if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
    return {*getattr(item, "fixturenames", ()), *(name for name in named if isinstance(name, str))}


@pytest.hookimpl(tryfirst=True)  # before the groups are read
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `--dist loadgroup`: tests of shared engines are one group, those of any other file one each."""
    sharing = {item.path for item in items if ENGINES & _asked(item)}
    for item in items:
        if RANKS & _asked(item):
            item.add_marker("ranks")
        item.add_marker(pytest.mark.xdist_group("engines" if item.path in sharing else item.path.stem))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint("llama", tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint("qwen3", tmp_path_factory.mktemp("tiny-qwen3"))


@pytest.fixture(scope="session")
def reference(llama: Path) -> Reference:
    return Reference(llama)


@pytest.fixture(scope="session")
def v1(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """Eager, v1 runner, steps of at most 64 tokens: prompts longer than that are prefilled in chunks."""
    host = Host(tmp_path_factory.mktemp("v1"), llama, max_num_batched_tokens=64, enable_prefix_caching=False, steering_rows=4, fault="rpc")
    yield host
    host.close()


@pytest.fixture(scope="session")
def cached(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """Prefix cache on, and so few KV blocks that concurrent requests preempt one another."""
    host = Host(tmp_path_factory.mktemp("cached"), llama, num_gpu_blocks=8, max_model_len=512, fault="rpc")
    yield host
    host.close()


@pytest.fixture(scope="session")
def v2(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """The v2 runner, through Triton's interpreter: right, and slow."""
    backend = Path(__file__).with_name("triton_cpu")
    env = {"PYTHONPATH": os.pathsep.join([str(backend), *filter(None, [os.environ.get("PYTHONPATH")])]), "TRITON_INTERPRET": "1"}
    host = Host(tmp_path_factory.mktemp("v2"), llama, env, runner="v2", max_num_batched_tokens=64, max_model_len=256, max_num_seqs=8)
    yield host
    host.close()


@pytest.fixture(scope="session")
def compiled(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """torch.compile (inductor on CPU), v1 runner."""
    host = Host(tmp_path_factory.mktemp("compiled"), llama, enforce_eager=False, max_num_batched_tokens=64, enable_prefix_caching=False)
    yield host
    host.close()


@pytest.fixture(scope="session")
def two_ranks() -> None:
    """Asked for by whatever starts an engine of several ranks itself."""


@pytest.fixture(scope="session")
def tp2(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """Two tensor-parallel ranks."""
    host = Host(tmp_path_factory.mktemp("tp2"), qwen3, tensor_parallel_size=2, fault="rpc")
    yield host
    host.close()


@pytest.fixture(scope="session")
def pp2(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """Two pipeline stages."""
    host = Host(tmp_path_factory.mktemp("pp2"), qwen3, pipeline_parallel_size=2)
    yield host
    host.close()
