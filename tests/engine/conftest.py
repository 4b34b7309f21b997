"""Engines that tests share: each starts once. An idle engine costs memory only."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from host import Host
from reference import Reference
from tiny import checkpoint


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
