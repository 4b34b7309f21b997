"""Do the Triton kernels do what the reference does, and do they compile for GPUs?

No GPU is needed: Triton interprets, and compiles ahead.

On a GPU `benchmarks/gpu/stage_kernels.py` asks the same questions.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from site_properties import PROPERTIES
from tree import ROOT

from midstream.kernels import triton_rows

#: What the program in its own process tries beyond the properties that both implementations have.
OWN = [
    "a_random_step_without_sums_gives_the_references_bits",
    "finite_rows_are_reduced_only_for_their_sizes",
    "few_programs_walk_over_many_tokens",
    "padding_beyond_the_buffers_is_left_alone",
    "a_kernel_that_leaves_a_row_out_counts_one_fewer",
    "sites_that_share_a_launch_give_the_bits_of_one_launch_each",
    "no_tokens_are_no_launch",
    "tensors_with_gaps_are_refused",
    "copied_rows_are_in_their_places",
]
#: Of many random steps: interpreted, they take 80 seconds.
RANDOM = [
    "a_random_step_is_what_the_definition_says",
    "sites_that_share_a_launch_give_the_bits_of_one_launch_each",
]
CERTAIN = [sentence for sentence in (*PROPERTIES, *OWN) if sentence not in RANDOM]
TESTS = ROOT / "tests"


def _in_its_own_process(*arguments: str, **environment: str) -> str:
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def tried(sentences: list[str]) -> dict[str, str | None]:
    """Sentence → what the interpreted kernels did wrong."""
    answer: dict[str, str | None] = json.loads(
        _in_its_own_process(str(TESTS / "site_interpreter.py"), *sentences)
    )
    assert answer.keys() == set(sentences)
    return answer


@pytest.fixture(scope="module")
def faults() -> dict[str, str | None]:
    return tried(CERTAIN)


@pytest.mark.long
@pytest.mark.parametrize("sentence", CERTAIN)
def test_the_interpreted_kernels_have_the_property(
    sentence: str, faults: dict[str, str | None]
) -> None:
    assert faults[sentence] is None, faults[sentence]


@pytest.mark.long
def test_the_interpreted_kernels_apply_every_family_and_capture_around_it() -> None:
    chosen = [
        "the_families_follow_each_other_in_the_documented_order",
        "before_sees_the_stream_unedited_and_after_edited",
    ]
    assert tried(chosen) == dict.fromkeys(chosen)


@pytest.mark.matrix
def test_the_interpreted_kernels_do_in_random_steps_what_the_reference_does() -> None:
    assert tried(RANDOM) == dict.fromkeys(RANDOM)


@pytest.mark.matrix
@pytest.mark.long
def test_the_kernels_compile_once_per_dtype_and_width_for_two_gpu_generations(
    tmp_path: Path,
) -> None:
    """A compilation that depends on the number of tokens or of sites could fall into the capture of
    a graph.
    """
    answer = _in_its_own_process(
        str(TESTS / "site_compiler.py"), TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path)
    )
    dtypes = 3
    widths = 3
    assert json.loads(answer) == {
        architecture: [dtypes * widths] * 3 for architecture in ("80", "90")
    }


def test_the_module_reads_no_values_on_the_host() -> None:
    """A read would wait for the device and cannot be captured in a graph."""
    tree = ast.parse((ROOT / "kernels" / "triton_site.py").read_text())
    called = {
        node.func.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    assert not called & {
        "item",
        "tolist",
        "cpu",
        "numpy",
        "synchronize",
        "nonzero",
        "any",
        "empty",
        "empty_like",
        "clone",
        "contiguous",
    }


@pytest.mark.parametrize(("rows", "programs"), [(3, 3), (8, 8), (100_000, 8)])
def test_rows_leave_by_one_launch_of_few_programs(
    rows: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that waits for the bus keeps a multiprocessor from the next forward."""
    kernel = MagicMock()
    monkeypatch.setattr(triton_rows, "_scatter", kernel)
    memory = torch.zeros(1, 4)
    places = torch.zeros(rows, dtype=torch.int64)
    triton_rows.scatter(memory, memory, places, places)
    assert [grid for _, grid, _ in kernel.mock_calls[::2]] == [((programs,),)]
