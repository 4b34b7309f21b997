"""Does a worker know who it is, and that there is only one of it?"""

import os
from pathlib import Path

import pytest

from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.settings.settings import Settings
from midstream.workers.engine.identity import WorkerLock, with_worker_id


def test_a_worker_without_an_id_is_named_after_host_and_model() -> None:
    first, second = (with_worker_id(Settings(model="org/some model")).worker_id for _ in range(2))
    assert first == second
    assert first.endswith("-some-model")


def test_an_id_becomes_a_plain_file_name() -> None:
    assert with_worker_id(Settings(worker_id="../a b@c")).worker_id == "..-a-b-c"


def test_a_second_worker_of_the_same_id_is_refused_with_the_pid_of_the_first(
    tmp_path: Path,
) -> None:
    """The lock is of an open file: another one in this process is as good as in another."""
    settings = Settings(data_dir=str(tmp_path), worker_id="w1")
    first = WorkerLock(settings)
    with pytest.raises(MidstreamError, match=f"pid {os.getpid()}"):
        WorkerLock(settings, patience_s=0)
    first.release()
    WorkerLock(settings, patience_s=0).release()
