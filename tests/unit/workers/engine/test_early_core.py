"""A process that was started early runs what vLLM would have spawned another one for."""

import multiprocessing
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from midstream.schemas.settings.settings import Settings, load_settings
from midstream.workers.engine import early_core
from midstream.workers.engine.early_core import EarlyCore


@pytest.fixture
def early() -> Iterator[EarlyCore]:
    process = EarlyCore(())
    early_core._waiting.append(process)
    yield process
    early_core._waiting.clear()


def says(file: Path, *more: object) -> multiprocessing.Process:
    """A process that writes a variable of its environment to the file."""
    command = ["sh", "-c", f"printf %s $SAID > {file}"]
    return early_core._Context().Process(target=subprocess.call, args=(command, *more))


def exit_code(process: EarlyCore) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])


def test_the_process_that_waits_runs_with_the_variables_of_its_start(
    early: EarlyCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAID", "now")
    process = says(tmp_path / "said")
    process.start()
    assert process.pid == early.pid
    process.join(60)
    assert process.exitcode == 0
    assert (tmp_path / "said").read_text() == "now"


@pytest.mark.slow("the process imports vLLM")
def test_a_process_that_waited_can_be_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A process's name is written where its variables were when it began."""
    early = EarlyCore(("vllm.utils.system_utils",))
    monkeypatch.setattr(early_core, "_waiting", [early])
    file = tmp_path / "name"
    named = f"""
import setproctitle
setproctitle.setproctitle("VLLM::EngineCore")
open({str(file)!r}, "w").write(open("/proc/self/cmdline").read() + open("/proc/self/comm").read())
"""
    process = early_core._Context().Process(target=exec, args=(named,))
    process.start()
    process.join(120)
    assert process.pid == early.pid
    assert file.read_text().startswith("VLLM::EngineCore")
    assert file.read_text().rstrip().endswith("VLLM::EngineCor")


def test_it_takes_one_process_and_later_ones_are_spawned(early: EarlyCore, tmp_path: Path) -> None:
    for number in range(2):
        process = says(tmp_path / str(number))
        process.start()
        assert (process.pid == early.pid) == (number == 0)
        process.join(60)
        assert process.exitcode == 0


def test_another_is_spawned_in_place_of_one_that_has_ended(
    early: EarlyCore, tmp_path: Path
) -> None:
    os.kill(early.pid, signal.SIGKILL)
    os.waitid(os.P_PID, early.pid, os.WEXITED | os.WNOWAIT)
    process = says(tmp_path / "said")
    process.start()
    assert process.pid != early.pid
    process.join(60)
    assert process.exitcode == 0


def test_another_is_spawned_where_files_are_passed(early: EarlyCore, tmp_path: Path) -> None:
    """Only a new process inherits them; the one that waits ends."""
    with multiprocessing.Pipe()[0] as connection:
        process = says(tmp_path / "said", -1, None, connection)
        process.start()
    assert process.pid != early.pid
    process.join(60)
    assert exit_code(early) == 0


def test_it_ends_in_silence_when_nothing_comes(capfd: pytest.CaptureFixture[str]) -> None:
    process = EarlyCore(())
    process.give_up()
    assert exit_code(process) == 0
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "settings",
    [
        Settings(engine="fake"),
        Settings(log_format="json"),
        load_settings({}, engine_options={"enforce_eager": False}),
    ],
)
def test_none_begins_where_its_modules_would_miss_variables(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early_core, "EarlyCore", lambda: pytest.fail("it began"))
    early_core.begin(settings)
    assert not early_core._waiting
