"""The order of a row's dimensions by how far two prompts differ in them, read from the files of all
ranks.
"""

from pathlib import Path

import numpy as np
from refusal_kit import refuses
from run_kit import run

from midstream.storage.store import open_store
from midstream_lab.run.neurons import order_by_difference, rows_of_run

SITE = ("mlp_act", 2)


def test_the_order_is_of_the_sum_over_places_with_the_ranks_columns_joined(tmp_path: Path) -> None:
    base = np.array([[0, 0, 0, 0], [1, 1, 1, 1], [9, 9, 9, 9]], float)
    source = np.array([[0, 5, 0, 1], [1, 1, 3, 1]], float)
    runs = (
        run(tmp_path, "base", base, [3, 4, 5], SITE),
        run(tmp_path, "source", source, [7, 8], SITE),
    )
    order = order_by_difference(open_store(str(tmp_path)), *runs, [SITE], [(3, 7), (4, 8)], 3)
    assert order == {SITE: [1, 2, 3]}, "5, 2 and 1; what is nowhere compared does not count"


def test_a_file_that_is_not_what_was_captured_is_named(tmp_path: Path) -> None:
    files = run(tmp_path, "base", np.zeros((1, 4)), [0], SITE)
    (tmp_path / "base.2").write_bytes((tmp_path / "base.0").read_bytes())
    with refuses("run base.0.base: base.2: its content has changed", kind="intervention_failed"):
        rows_of_run(open_store(str(tmp_path)), files, [SITE])
