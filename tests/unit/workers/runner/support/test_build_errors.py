"""Why a rank could not build or run the model reaches the worker, also where vLLM says nothing."""

import logging
from pathlib import Path

import pytest

from midstream.workers.runner.support import build_errors
from midstream.workers.runner.support.vllm_source import installed


def test_an_error_without_a_text_is_named_with_its_place_in_vllm() -> None:
    from vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d import (
        causal_conv1d_fn_cpu as convolve,
    )

    with pytest.raises(Exception) as caught:  # noqa: PT011 - any of them
        convolve(*[None] * 5, activation="gelu")
    assert build_errors.reason_of(caught.value).startswith(
        f"{caught.type.__name__} at vllm/model_executor/"
    )


def test_an_error_with_a_text_is_that_text_in_one_line() -> None:
    assert (
        build_errors.reason_of(ValueError("Unsupported\nactivation: gelu"))
        == "Unsupported activation: gelu"
    )


def test_what_a_rank_keeps_is_read_once_and_by_its_own_start(tmp_path: Path) -> None:
    folder = str(tmp_path / "spill")
    with pytest.raises(AssertionError), build_errors.kept_for_worker(folder, "boot-1"):
        raise AssertionError
    starts = ("boot-2", "boot-1", "boot-1")
    assert [build_errors.kept(folder, start) for start in starts] == ["", "AssertionError", ""]


def test_the_reason_is_that_of_the_first_rank_that_failed(tmp_path: Path) -> None:
    folder = str(tmp_path)
    for reason in ("out of memory", "connection closed by peer"):
        with pytest.raises(RuntimeError), build_errors.kept_for_worker(folder, "boot"):
            raise RuntimeError(reason)
    assert build_errors.kept(folder, "boot") == "out of memory"


@pytest.mark.parametrize("message", ["EngineCore failed to start.", "WorkerProc failed to start."])
def test_an_error_that_vllm_logs_as_a_process_fails_to_start_is_kept(
    tmp_path: Path, message: str
) -> None:
    """Such as shared memory that has no room, or a device that is in use."""
    logger = logging.getLogger("start")
    handler = build_errors.KeptForWorker(str(tmp_path), "boot")
    logger.addHandler(handler)
    try:
        raise RuntimeError("64 MiB free")
    except RuntimeError:
        logger.exception("a call failed")
        assert build_errors.kept(str(tmp_path), "boot") == "", "it does not end the process"
        logger.exception(message)
    logger.removeHandler(handler)
    assert build_errors.kept(str(tmp_path), "boot") == "64 MiB free"
    files = ("v1/engine/core.py", "v1/executor/multiproc_executor.py")
    assert message in "".join((installed().folder / file).read_text() for file in files)
