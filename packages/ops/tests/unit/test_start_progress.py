"""What `midstream up` says while a worker starts."""

from pathlib import Path

import pytest

from midstream_ops.start_progress import DOWNLOAD_S, StartProgress, downloaded


def test_each_part_is_told_of_once_with_the_seconds_of_the_one_before() -> None:
    said: list[str] = []
    progress = StartProgress("/models/m", said.append)
    progress.look("", 0.0)
    progress.look("worker begins imports\n", 1.0)
    progress.look("worker begins imports\nnoise\n", 2.0)
    everything = "worker begins imports\nnoise\nworker begins configuration\nworker begins else\n"
    progress.look(everything, 9.5)
    assert said == [
        "worker: importing torch and vLLM",
        "worker: reading the model's configuration (imports: 8.5 s)",
        "worker: else (configuration: 0.0 s)",
    ]


def test_a_download_is_told_of_while_it_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    blobs = tmp_path / "models--org--m" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "whole").write_bytes(bytes(100))
    assert downloaded("org/m") == downloaded("") == 0
    (blobs / "part.incomplete").write_bytes(bytes(3 << 20))
    said: list[str] = []
    progress = StartProgress("org/m", said.append)
    progress.look("worker begins configuration\n", 0.0)
    for at in (1.0, DOWNLOAD_S + 1, DOWNLOAD_S + 2, 3 * DOWNLOAD_S):
        progress.look("worker begins configuration\n", at)
    assert said[1:] == ["worker: 3 MiB of org/m downloaded so far"]
