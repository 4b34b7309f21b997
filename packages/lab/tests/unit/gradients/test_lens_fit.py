"""The folder of a fitted lens is on disk before its name is in the registry."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from gradient_kit import model_info
from midstream_fake_engine.gradients import small_model

from midstream.schemas.artifacts.jacobian_lenses import JacobianFit, StoredLensFit
from midstream.schemas.jobs.jobs import State
from midstream_lab.gradient_jobs import fit_attempt
from midstream_lab.records.fits import FitWork

INFO = model_info(num_layers=3, hooks=["post_block"])
WANTED = StoredLensFit(
    name="mine",
    folder="mine",
    layers=[0, 1],
    prompts=[[1, 2, 3, 4, 5]],
    fit=JacobianFit(skip_first=1),
    hidden_size=8,
)


class Engine:
    info = INFO

    async def run(self, work: Callable[[Any, Callable[[], None]], Any]) -> Any:
        return await asyncio.to_thread(work, small_model(INFO), lambda: None)


async def test_a_lens_is_synced_before_it_is_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[tuple[str, Path]] = []
    fsync = os.fsync
    replace = os.replace

    def synced(descriptor: int) -> None:
        steps.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def replaced(source: Path, target: Path) -> None:
        steps.append(("rename", Path(target)))
        replace(source, target)

    async def put(
        model: str, name: str, make: Callable[[Any], Any], blobs: Any, *, of_accepted: bool
    ) -> None:
        assert of_accepted, "the room that is kept for accepted jobs"
        steps.append(("register", tmp_path / make(None).path))

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    monkeypatch.setattr(fit_attempt, "Registry", lambda *_: SimpleNamespace(put=put))
    view = AsyncMock(return_value=SimpleNamespace(attempt=1, state=State.RUNNING))
    ledger: Any = SimpleNamespace(
        settings=SimpleNamespace(artifacts_of=lambda _: str(tmp_path)), view=view
    )
    work = FitWork(fit=WANTED)
    job = SimpleNamespace(id="job_1", model="m", work_as=lambda _: work)
    attempt: Any = SimpleNamespace(
        job=job,
        number=1,
        check_unsteered=lambda: None,
        check=lambda: None,
        report=AsyncMock(),
        check_answer=lambda answer, wanted: None,
    )
    bench: Any = SimpleNamespace(ledger=ledger, engine=Engine())
    await fit_attempt.FitAttempt(bench, attempt).run()
    assert [step for step, _ in steps] == ["sync", "rename", "sync", "sync", "sync", "register"]
    (_, draft), (_, file), *directories, (_, folder) = steps
    assert draft == file.with_name(f"{file.name}.draft")
    assert file.parent == folder
    assert [path for _, path in directories] == [folder, folder.parent, tmp_path]
