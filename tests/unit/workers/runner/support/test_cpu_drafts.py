"""What vLLM's CPU build runs in place of Triton kernels does what the kernels do."""

import json
import subprocess
import sys
from unittest.mock import Mock

import pytest
import torch
from tree import ROOT
from vllm.v1.sample import rejection_sampler

from midstream.workers.runner.support import cpu_drafts


@pytest.mark.long
def test_each_substitute_of_a_kernel_on_a_cpu_does_what_the_kernel_does() -> None:
    """Substitutes that no engine runs are left out; a new one that is compared with nothing is a
    fault.
    """
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "cpu_kernels.py")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    faults = json.loads(done.stdout)
    assert faults == dict.fromkeys(faults)


def test_an_engine_on_a_cpu_gets_the_substitutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own functions, which discard what they write, read memory that nobody wrote, or fail,
    are no longer called.
    """
    names = ["expand_batch_to_tokens", "rejection_sample", "apply_top_k_top_p"]
    for name in names:
        monkeypatch.setattr(rejection_sampler, name, None)
    cpu_drafts.install()
    found = [getattr(rejection_sampler, name) for name in names]
    assert found == [getattr(cpu_drafts, name) for name in names]


def test_the_drafts_that_fill_a_step_are_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's substitute for the kernel that accepts drafts may accept -1."""
    sample = Mock()
    monkeypatch.setattr(cpu_drafts, "_sample", sample)
    cpu_drafts.rejection_sample(torch.tensor([5, -1, 0, -1]), [2], use_fp64_gumbel=False)
    drafts, counts = sample.call_args.args
    assert drafts.tolist() == [5, 0, 0, 0]
    assert counts == [2]


def test_a_step_without_a_draft_is_masked_by_top_k_alone() -> None:
    """vLLM looks for the largest of no numbers."""
    logits = torch.zeros(0, 5)
    assert cpu_drafts.apply_top_k_top_p(logits, torch.zeros(0, dtype=torch.int64), None) is logits
    two = cpu_drafts.apply_top_k_top_p(torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([1]), None)
    assert two.argmax().item() == 1
