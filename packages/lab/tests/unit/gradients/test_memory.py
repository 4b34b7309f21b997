"""The estimate of memory is at least the measured peak, and not much more."""

import subprocess
import sys
from pathlib import Path

import pytest
from gradient_kit import BASE, PointsOf

from midstream_lab.gradients.loading import SLACK_BYTES, Footprint

ROOT = Path(__file__).resolve().parents[5]

#: Prints measured bytes and the estimate without parameters, in a process of its own: the peak of
#: resident memory is that of the process.
SCRIPT = """
import gc, sys, torch
from midstream_lab.gradients.loading import Footprint
from midstream_lab.gradients.points import ATTENTION
from midstream_lab.gradients.points import Points
from transformers import AutoModelForCausalLM

def status(name):
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(lines[name].split()[0]) * 1024

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation=ATTENTION)
points = Points(model.to(torch.float32))
found, sites = Footprint(points), [("post_block", layer) for layer in range(points.num_layers)]
for tokens, batch in ((256, 8), (2048, 1)):
    ids = points.batch([[5] * tokens] * batch)
    gc.collect()
    open("/proc/self/clear_refs", "w").write("5")
    before = status("VmRSS")
    run = points.run(ids, sites, grad=True)
    run.gradients(run.logits.double().log_softmax(-1)[..., 3].sum())
    del run
    print(status("VmHWM") - before, found.memory(tokens, batch, sites).total)
"""


@pytest.mark.long
def test_estimate_bounds_the_measured_peak(points_of: PointsOf, tiny_root: Path) -> None:
    points_of("llama")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tiny_root / "llama")],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={"PATH": "", "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"},
    )
    for line in done.stdout.splitlines():
        measured, estimate = map(int, line.split())
        assert measured <= estimate <= 2 * measured + 2 * SLACK_BYTES, line


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_kept_bytes_are_a_polynomial_in_tokens(points_of: PointsOf, name: str) -> None:
    found = Footprint(points_of(name))
    for tokens in (10, 100, 300):
        assert found.memory(tokens).activations == pytest.approx(found._kept(tokens), rel=1e-3)
    assert found.memory(300, batch=3).activations == pytest.approx(3 * found._kept(300), rel=1e-3)


def test_gradients_of_sites_are_counted(points_of: PointsOf) -> None:
    points = points_of("llama")
    site = Footprint(points).memory(len(BASE), 2, [("z", 1), ("mlp_act", 1)]).gradients
    assert site == 2 * 2 * len(BASE) * 4 * (points.width("z") + points.width("mlp_act"))
