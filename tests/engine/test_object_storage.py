"""Are the rows of a real engine in a bucket those that it computed, and do its ranks read them back
from there? Real vLLM.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import s3_kit
from stack import Stack

from midstream.client import CaptureReader
from midstream.schemas.jobs.jobs import State
from midstream.schemas.prompts.selectors import HOOKS as RESIDUAL
from midstream.schemas.requests.source_runs import RunRow, row_name, run_key
from midstream.schemas.requests.specs import StoredCapture, StoredSteering
from midstream.storage.store import open_store

pytestmark = pytest.mark.long

HOOKS = {"pre_attn": [0, 1], "post_block": [0, 1]}


@pytest.fixture(scope="module")
def stack(
    llama: Path, proxy: s3_kit.FaultProxy, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    engine = {
        "engine": "vllm",
        "model": str(llama),
        "model_name": "tiny",
        "engine.max_model_len": 4096,
        "kv_cache_gib": 0.1,
        "lease_s": 60,
    }
    engine["tuning.capture_window_mib"] = 1
    store = {
        "artifact_store": f"s3://{s3_kit.new_bucket()}/lab?endpoint={proxy.url}",
        "artifact_access_key": s3_kit.ACCESS_KEY,
        "artifact_secret_key": s3_kit.SECRET_KEY,
    }
    with Stack(tmp_path_factory.mktemp("stack"), start_timeout_s=400, **engine, **store) as running:
        yield running


@pytest.mark.parametrize("layout", ["packed", "per_file", "segment"])
def test_rows_in_the_bucket_are_those_of_the_engine(stack: Stack, layout: str) -> None:
    both = StoredCapture(
        sites=HOOKS,
        positions="all",
        tag=layout.replace("_", "-"),
        layout=layout,
        consumers=["filesystem", "memory"],
    )
    job = stack.submit(["a prompt", "another"], max_tokens=5, capture=both)
    view = stack.wait(job)
    assert (view.state, view.capture_status) == (State.SUCCEEDED, "ok")
    told = CaptureReader.from_bytes(
        [made.rows for made in stack.result(job).capture_results.consumers if made.rows]
    )
    stored = CaptureReader(stack.settings.artifacts, job)
    assert stored.requests() == told.requests() == [0, 1]
    for request in stored.requests():
        for hook, layers in HOOKS.items():
            for layer in layers:
                np.testing.assert_array_equal(
                    stored.raw(layer, hook, request), told.raw(layer, hook, request)
                )
    assert all(check.ok for check in stored.verify())
    assert not list(stack.directory.rglob("*.safetensors"))


def test_a_long_capture_and_a_patch_from_it_go_through_the_bucket(stack: Stack) -> None:
    """Beyond the window rows wait in a scratch file; a rank then reads a row of it from the
    bucket.
    """
    long = StoredCapture(
        sites={hook: [0, 1] for hook in RESIDUAL}, positions="all", tag="long", layout="packed"
    )
    job = stack.submit(
        ["the source of a patch"], max_tokens=1500, ignore_eos=True, capture=long, run="long"
    )
    assert stack.wait(job).state is State.SUCCEEDED
    reader = CaptureReader(stack.settings.artifacts, job)
    assert len(reader.positions()) > 1500
    row = row_name(RunRow(run_key(job, 0, "long"), "post_block", 0, 2))
    edit = StoredSteering(
        layers=[0], hook="post_block", positions=[2], family="replace", tensors=[row], numbers=[1.0]
    )
    patched = stack.submit(
        ["another prompt entirely"],
        max_tokens=1,
        steering=[edit],
        runs={"long": job},
        capture=StoredCapture(sites={"post_block": [0]}, positions=[2], tag="patched", at="after"),
    )
    assert stack.wait(patched).state is State.SUCCEEDED
    with CaptureReader(open_store(stack.settings.artifacts), patched) as edited:
        np.testing.assert_array_equal(
            edited.array(0)[0], reader.array(0, "post_block")[reader.positions().index(2)]
        )
