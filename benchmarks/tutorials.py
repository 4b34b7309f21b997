"""Measures each tutorial of `examples/tutorials` beside the TransformerLens code that it shows, and checks that both print the same.

    make lens                                                                     # TransformerLens' own environment
    midstream up --set hooks=all,inside --set dtype=float32 --set sae_dir=$PWD/examples/data/saes
    python benchmarks/tutorials.py            # the table of RESULTS.md
    python benchmarks/tutorials.py --write    # the same, and writes outputs and figures of time into the notebooks

Each side is a process of its own, from start to end. TransformerLens loads the model in it; Midstream's server has loaded it.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import nbclient  # noqa: E402
import nbformat  # noqa: E402
from notebooks import TUTORIALS, code, difference, lines, peer_code, read  # noqa: E402

from midstream.workers.demo_model import fetch_demo_model  # noqa: E402

PEER = ROOT / ".cache" / "lens" / "bin" / "python"
#: The end of what loads the model in TransformerLens' code.
LOADED = "dtype=torch.float32)\n"
#: The sentence of a notebook with the figures.
FIGURES = re.compile(r"LINES|Midstream: \d+ lines.*?to load the model\)\.", re.DOTALL)


def run(python: Path | str, source: str, environment: dict[str, str]) -> tuple[float, str]:
    """(Seconds, what it printed). Raises SystemExit with its errors."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "tutorial.py"
        script.write_text(source)
        start = time.perf_counter()
        done = subprocess.run([str(python), str(script)], env=environment, cwd=folder, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"{source}\n{done.stderr}")
    return seconds, done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="outputs and figures into the notebooks")
    parser.add_argument("--only", default="", help="tutorials whose name has this in it")
    options = parser.parse_args()
    environment = {**os.environ, "MPLBACKEND": "Agg", "MODEL": str(fetch_demo_model()), "SAES": str(ROOT / "examples" / "data" / "saes")}
    print("| tutorial | lines, Midstream | TransformerLens | seconds, Midstream | TransformerLens | of these, loading |")
    print("|---|---|---|---|---|---|")
    for path in TUTORIALS:
        if options.only not in path.stem:
            continue
        notebook = read(path)
        ours, theirs = code(notebook), peer_code(notebook)
        load, _ = run(PEER, theirs.partition(LOADED)[0] + LOADED, environment)
        seconds, found = run(sys.executable, ours, environment)
        peers, wanted = run(PEER, theirs, environment)
        if wrong := difference(found, wanted):
            raise SystemExit(f"{path.name}: the two print differently:\n{wrong}")
        print(f"| `{path.stem}` | {lines(ours)} | {lines(theirs)} | {seconds:.1f} | {peers:.1f} | {load:.1f} |", flush=True)
        if options.write:
            figures = (
                f"Midstream: {lines(ours)} lines and {seconds:.1f} s, with a server that has loaded the model. "
                f"TransformerLens: {lines(theirs)} lines and\n{peers:.1f} s ({load:.1f} s of them to load the model)."
            )
            notebook.cells[-1].source = FIGURES.sub(figures, notebook.cells[-1].source)
            nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
            for cell in notebook.cells:
                cell.metadata.pop("execution", None)  # times of day
            nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
