"""Does a process of the engine end with the one that started it, whenever that ends?"""

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from midstream.broker.processes.orphans import die_with_parent
from midstream.client.stack.processes import birth, wait_for

#: Starts a child as vLLM starts its processes, says its pid, and stays. The child asks to end with
#: its parent when it is let: a process that imports vLLM takes seconds until then.
PARENT = """
import multiprocessing, time
from pathlib import Path

folder = Path({folder!r})

def live():
    (folder / "started").touch()
    while not (folder / "asks").exists():
        time.sleep(0.01)
    from midstream.broker.processes.orphans import die_with_parent
    die_with_parent()
    (folder / "asked").touch()
    time.sleep(600)

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=live)
    child.start()
    print(child.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("when", ["after it asked", "before it asked"])
def test_an_orphan_ends_even_if_the_parent_died_first(tmp_path: Path, when: str) -> None:
    program = tmp_path / "parent.py"
    program.write_text(PARENT.format(folder=str(tmp_path)))
    parent = subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE)
    pid = born = 0
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        born = birth(pid)
        assert wait_for(lambda: (tmp_path / "started").exists(), 60)
        if when == "after it asked":
            (tmp_path / "asks").touch()
            assert wait_for(lambda: (tmp_path / "asked").exists(), 60)
        parent.kill()
        parent.wait()
        (tmp_path / "asks").touch()
        assert wait_for(lambda: birth(pid) != born, 60), "it goes on, and nobody knows of it"
        assert (tmp_path / "asked").exists() == (when == "after it asked")
    finally:
        parent.kill()
        if born and birth(pid) == born:
            os.kill(pid, signal.SIGKILL)
        parent.communicate()


HELPERS = {
    "midstream.workers.serving.harvests.process": ["2048", "600"],
    "midstream.workers.engine.prompts.format_check": ["none", "1", "1", "0", "1"],
    "midstream.api.resolve.prompts.tokenizer_pool": ["1"],
}


@pytest.mark.parametrize("module", HELPERS)
def test_a_helper_whose_starter_died_before_it_ran_ends(module: str) -> None:
    """Its input stays open, as a request that was already sent does: it would begin to compute."""
    starter = subprocess.Popen(["true"])
    starter.wait()
    command = [sys.executable, "-m", module, *HELPERS[module], str(starter.pid)]
    helper = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        assert helper.wait(60) == -signal.SIGKILL
    finally:
        helper.kill()
        helper.communicate()


def test_a_process_without_a_parent_to_watch_goes_on() -> None:
    assert multiprocessing.parent_process() is None
    die_with_parent()
