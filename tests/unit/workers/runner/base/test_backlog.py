"""What a rank's writers have not finished is seen by others, and begins at 0 with the rank."""

import subprocess
import sys
from pathlib import Path

import pytest
from rank_kit import plane_config

from midstream.workers.runner.base.backlog import Backlog


def test_others_see_a_ranks_backlog_which_begins_at_zero_at_each_start(tmp_path: Path) -> None:
    sizes = dict.fromkeys(["steering_rows", "steering_entries", "step_tokens"], 1)
    first, second = (plane_config(tmp_path, boot=boot, **sizes) for boot in ("b1", "b2"))
    assert Backlog.of(first, 0).size == 0, "of another machine"
    own = Backlog.begin(first, 0)
    seen = Backlog.of(first, 0)
    other = Backlog.begin(first, 1)
    own.send(5 << 32)
    own.send(7)
    own.free(1 << 32)
    assert seen.freed("writer") == 1 << 32
    assert seen.waiting("writer") == (4 << 32) + 7
    far = Backlog.of(first, 0, frees=True)
    own.send(9, "reading")
    own.send(11, "placed")
    far.free(2)
    far.free(3, "placed")
    assert seen.freed("writer") == (1 << 32) + 2
    assert seen.freed("placed") == 3
    assert {work: seen.waiting(work) for work in ("writer", "placed", "reading")} == {
        "writer": (4 << 32) + 5,
        "placed": 8,
        "reading": 9,
    }
    assert seen.size == (4 << 32) + 5 + 9 + 8
    assert other.size == 0
    with pytest.raises(TypeError):
        seen.free(1)
    again = Backlog.begin(second, 0)
    again.send(3)
    assert Backlog.of(second, 0).size == 3
    assert seen.size == (4 << 32) + 22
    names = sorted(file.name for file in Path(first.outbox_dir).glob("*.backlog"))
    assert [name.split(".")[1:3] for name in names] == [["rank0", "b2"], ["rank1", "b1"]]


def test_no_reader_needs_torch() -> None:
    code = "import sys, midstream.workers.runner.base.backlog; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
