"""Times the encoding of rows with a sparse autoencoder beside sae-lens' own, from the same files,
on one thread of the same machine.

    python benchmarks/sae_encode.py --peer /path/to/an/environment/with/sae-lens/bin/python

sae-lens needs another environment: it brings other versions of packages of ours. Both read the
files that this script writes, encode the same rows, and take the ten largest activations of each;
`--peer` prints its numbers, which must be equal.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

#: (d_in, d_sae, rows): a small one of the demo model, and one of Gemma Scope's usual size.
SIZES = ((576, 4096, 512), (2304, 16384, 64))
TOP, REPEATS = 10, 9
ARCHITECTURE = "jumprelu"


def best(call: Callable[[], object]) -> float:
    """Seconds of CPU time of the fastest of several runs: on one thread, so that others on the
    machine matter less.
    """
    call()
    found = []
    for _ in range(REPEATS):
        began = time.process_time()
        call()
        found.append(time.process_time() - began)
    return min(found)


def write(folder: Path, d_in: int, d_sae: int, rows: int) -> None:
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    folder.mkdir()
    encoder = normal(d_in, d_sae) / np.float32(d_in**0.5)
    tensors = {
        "W_enc": encoder,
        "W_dec": np.ascontiguousarray(encoder.T),
        "b_enc": normal(d_sae) / 10,
        "b_dec": normal(d_in) / 10,
        "threshold": np.full(d_sae, 2.2, np.float32),
    }
    save_file(tensors, folder / "sae_weights.safetensors")
    config = {
        "architecture": ARCHITECTURE,
        "d_in": d_in,
        "d_sae": d_sae,
        "dtype": "float32",
        "device": "cpu",
    }
    metadata = {"hook_name": "blocks.1.hook_resid_post", "sae_lens_version": "6.54.12"}
    (folder / "cfg.json").write_text(json.dumps(config | {"metadata": metadata}))
    np.save(folder / "rows.npy", normal(rows, d_in))


def theirs(folder: Path) -> None:
    """Runs in the other environment."""
    import torch
    from sae_lens import SAE

    sae, rows = SAE.load_from_disk(folder), torch.from_numpy(np.load(folder / "rows.npy"))
    with torch.no_grad():
        encode = best(lambda: sae.encode(rows))
        top = best(lambda: sae.encode(rows).topk(TOP, dim=-1))
        values = sae.encode(rows).topk(TOP, dim=-1).values
    print(json.dumps({"encode": encode, "top": top, "values": values.tolist()}))


def ours(folder: Path) -> dict[str, object]:
    import torch

    from midstream.storage.formats.sae_files import reading
    from midstream.workers.runner.readings.sae import load

    with reading(folder) as (content, _):
        sae = load(folder, content.digest)
    rows = torch.from_numpy(np.load(folder / "rows.npy"))
    with torch.inference_mode():
        encode, top = best(lambda: sae.encode(rows)), best(lambda: sae.top(rows, TOP))
        found = sae.top(rows, TOP)
    return {
        "encode": encode,
        "top": top,
        "values": found.activations,
        "active": float(found.active.mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", required=True, help="python of an environment with sae-lens")
    parser.add_argument("--theirs", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.theirs:
        theirs(asked.theirs)
        return
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if os.environ.get("OMP_NUM_THREADS") != "1":
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)
    print(
        "| d_in | features | rows | sae-lens encode | ours | sae-lens encode and top "
        "10 | ours, with errors | largest difference |"
    )
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        for d_in, d_sae, rows in SIZES:
            folder = Path(scratch, f"{d_in}")
            write(folder, d_in, d_sae, rows)
            command = [asked.peer, __file__, "--peer", "-", "--theirs", str(folder)]
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False
            )
            if done.returncode:
                sys.exit(done.stderr[-2000:])
            peer, mine = json.loads(done.stdout.splitlines()[-1]), ours(folder)
            off = float(np.abs(np.array(peer["values"]) - mine["values"]).max())
            times = [
                f"{1000 * float(seconds):.0f} ms"
                for seconds in (peer["encode"], mine["encode"], peer["top"], mine["top"])
            ]  # type: ignore[arg-type]
            print(f"| {d_in} | {d_sae:,} | {rows} | " + " | ".join(times) + f" | {off:.1e} |")


if __name__ == "__main__":
    main()
