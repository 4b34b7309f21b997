"""The example that trains a sparse autoencoder with sae-lens runs, with tiny sizes, from harvest to
features that are served.
"""

import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from stack import Stack
from tree import ROOT

from midstream.client import Client

pytestmark = [pytest.mark.timeout(1500), pytest.mark.packages]
LAYER = 15


@pytest.fixture(scope="module")
def python(library) -> Path:
    return library("sae")


@pytest.fixture(scope="module")
def service(serve, tmp_path_factory: pytest.TempPathFactory) -> Stack:
    return serve(
        **{"engine.max_model_len": 256}, artifacts_dir=str(tmp_path_factory.mktemp("artifacts"))
    )


def test_the_example_trains_registers_and_shows_features(python: Path, service: Stack) -> None:
    out = Path(service.settings.artifacts_of("saes")) / "small"
    sizes = "--rounds 1 --tokens 12 --features 64 --active 8 --steps 400"
    example = [str(python), str(ROOT / "examples" / "train_sae.py"), "--name", "small"]
    command = [*example, "--out", str(out), *sizes.split()]
    environment = {**os.environ, "MIDSTREAM_PUBLIC_URL": service.url}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    share = float(re.search(r"not trained on: ([-0-9.]+)% of the variance", done.stdout)[1])  # type: ignore[index]
    assert share > 30, "without training it would be negative"
    assert len(re.findall(r"^\| (\d+) \| .*\*\*.*\|$", done.stdout, re.MULTILINE)) == 3
    with Client(service.url) as client:
        (registered,) = client.saes.list()
        assert registered.name == "small"
        assert registered.layer == LAYER
        assert registered.form.architecture == "jumprelu"
        found = client.features(
            "The soup was rich and warm, and we asked for a second bowl.", "small", top_k=64
        )
    check_against_sae_lens(python, service, out, found.reading.features)


def check_against_sae_lens(
    python: Path, service: Stack, out: Path, served: list[list[int]]
) -> None:
    """What is served is what sae-lens loads: the same features are active at each token of a
    prompt, but for what rounding decides.
    """
    with Client(service.url) as client:
        job = client.run(
            model="demo",
            prompts=["The soup was rich and warm, and we asked for a second bowl."],
            sampling={"max_tokens": 1},
            capture={"layers": LAYER, "positions": "all_prompt"},
            progress=False,
        )
        rows = client.capture(job).array(LAYER)
    np.save(out / "rows.npy", rows.astype(np.float32))
    code = (
        "import sys, numpy, torch; from sae_lens import SAE; sae = "
        "SAE.load_from_disk(sys.argv[1])\n"
        "values = sae.encode(torch.from_numpy(numpy.load(sys.argv[1] + "
        "'/rows.npy'))).detach().numpy()\n"
        "print([numpy.flatnonzero(row > 0).tolist() for row in values])"
    )
    done = subprocess.run(
        [str(python), "-c", code, str(out)], capture_output=True, text=True, check=True
    )
    theirs = [
        set(map(int, re.findall(r"\d+", row)))
        for row in re.findall(r"\[([0-9, ]*)\]", done.stdout.strip()[1:-1])
    ]
    for mine, other in zip(served[1:], theirs[1:], strict=True):
        assert len(set(mine) ^ other) <= 1 + len(other) // 10
