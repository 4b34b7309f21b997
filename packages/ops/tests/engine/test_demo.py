"""Does the demo do all that it claims, on the real engine and the real model?"""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import wheel_kit

from midstream.client import CaptureReader
from midstream_ops.demo import FACTS, HIDDEN_SIZE, NUM_LAYERS

CLAIMS = (
    "6 files of 6 responses",
    "Paris",
    "registered as module sea",
    "along the direction",
    "0, at most 0: processes left behind",
    "Try next",
    "300 cells, each confirmed by every rank",
    "; 0 skipped",
    "unpatched, the model answers Paris for one prompt and Rome for the other",
)
#: The first prompt's subject and its last token are the rows of the heatmap that carry the answer.
ROWS = re.compile(r"^  osse 2 +[▆▇█]{8}.*▁{8}$\n(?:.*\n)*^  of 9 +▁{8}.*[▆▇█]{8}$", re.MULTILINE)
AGREED = re.compile(
    r"determinism: consistent, 1 rank in 1 stage of 1 worker, checksum [0-9a-f]{16} "
    r"over [1-9]\d* actions"
)


# field case 19
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_demo_runs_from_the_wheel_and_leaves_valid_files(tmp_path: Path) -> None:
    wheel = wheel_kit.all_built(wheel_kit.exported(tmp_path / "source"), tmp_path / "wheel")
    shutil.rmtree(tmp_path / "source")
    python = wheel_kit.borrowing(tmp_path / "env", wheel)
    said = wheel_kit.run(
        python.parent / "midstream", "demo", "--data", tmp_path / "kept", cwd=tmp_path
    )
    assert "failures: 0" in said
    for claim in CLAIMS:
        assert claim in said
    assert AGREED.search(said)
    assert ROWS.search("\n".join(map(str.rstrip, said.splitlines())))
    assert (tmp_path / "kept" / "sweep.png").read_bytes().startswith(b"\x89PNG")
    folders = sorted((tmp_path / "kept" / "captures" / "demo").iterdir())
    assert len(folders) == len(FACTS)
    for folder in folders:
        reader = CaptureReader(folder)
        assert [check.ok for check in reader.verify()] == [True]
        rows = reader.stack()
        assert rows.shape == (NUM_LAYERS, len(reader.token_ids()), HIDDEN_SIZE)
        assert np.isfinite(rows).all()
