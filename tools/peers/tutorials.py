"""Measures each tutorial of `examples/tutorials` beside the TransformerLens code that it shows, and
checks that both print the same.

    make lens                                     # TransformerLens' own environment
    OMP_NUM_THREADS=1 midstream up --set hooks=all,inside --engine dtype=float32 \\
        --set artifacts_dir=$PWD/examples/data
    python tools/peers/tutorials.py --repeats 3    # medians of alternating rounds
    python tools/peers/tutorials.py --write        # one round; writes the notebooks' outputs

Each side is a process of its own, from start to end. TransformerLens loads the model in it;
Midstream's server, found as clients find it, has loaded it. CPU seconds are those of the process,
and for Midstream also those of the server's processes meanwhile. Each side computes in one thread,
and in float32.
"""

import argparse
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "pages"))

import nbclient  # noqa: E402
import nbformat  # noqa: E402
from notebooks import TUTORIALS, code, difference, lines, peer_code, read  # noqa: E402

from midstream.client.sdk import discovery  # noqa: E402
from midstream_ops.demo_model import fetch_demo_model  # noqa: E402
from midstream_ops.processes import members  # noqa: E402

PEER = ROOT / ".cache" / "lens" / "bin" / "python"
#: The end of what loads the model in TransformerLens' code.
LOADED = "dtype=torch.float32)\n"
#: The sentence of a notebook with the figures.
FIGURES = re.compile(
    r"Midstream: \d+ lines.*?TransformerLens: \d+ lines(?:[^.]|\.\d)*\.", re.DOTALL
)
HEAD = """\
| tutorial | lines | lines, TransformerLens | seconds (CPU) | seconds (CPU), TransformerLens \
| of these, to load the model | ratio (CPU) |
|---|---|---|---|---|---|---|"""
TICKS = os.sysconf("SC_CLK_TCK")


class Cost(NamedTuple):
    """Of one run of one side."""

    seconds: float
    cpu: float  # seconds
    printed: str


def server_cpu(stack: discovery.RunningStack) -> float:
    """CPU seconds of all processes of the server so far."""
    pids = [pid for session, _ in stack.processes.values() for pid in members(session)]
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(each[11]) + int(each[12]) for each in fields) / TICKS


def run(
    python: Path | str,
    source: str,
    environment: dict[str, str],
    stack: discovery.RunningStack | None = None,
) -> Cost:
    """`stack`: whose CPU time counts, too. Raises SystemExit with the program's errors."""
    served = server_cpu(stack) if stack else 0.0
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "tutorial.py"
        script.write_text(source)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        start = time.perf_counter()
        done = subprocess.run(
            [str(python), str(script)],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.perf_counter() - start
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{source}\n{done.stderr}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(seconds, cpu + (server_cpu(stack) - served if stack else 0.0), done.stdout)


def median(costs: list[Cost]) -> Cost:
    """Of the seconds and of the CPU seconds, each by itself."""
    return Cost(
        statistics.median(each.seconds for each in costs),
        statistics.median(each.cpu for each in costs),
        costs[0].printed,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, default=Path(".midstream"), help="of the server")
    parser.add_argument(
        "--write", action="store_true", help="outputs and figures into the notebooks"
    )
    parser.add_argument("--repeats", type=int, default=1, help="rounds")
    parser.add_argument("--only", default="", help="tutorials whose name has this in it")
    options = parser.parse_args()
    stack = discovery.running(options.data_dir.resolve())
    if stack is None:
        raise SystemExit(f"no server runs on {options.data_dir}: `midstream up` starts one")
    os.environ |= {"MPLBACKEND": "Agg", "MIDSTREAM_PUBLIC_URL": stack.url, "OMP_NUM_THREADS": "1"}
    environment = {
        **os.environ,
        "MODEL": str(fetch_demo_model()),
        "SAES": str(ROOT / "examples" / "data" / "saes"),
    }
    print(HEAD)
    for path in TUTORIALS:
        if options.only not in path.stem:
            continue
        notebook = read(path)
        source = code(notebook)
        peer_source = peer_code(notebook)
        rounds = []
        for _ in range(options.repeats):
            ours = run(sys.executable, source, environment, stack)
            load = run(PEER, peer_source.partition(LOADED)[0] + LOADED, environment)
            peer = run(PEER, peer_source, environment)
            if wrong := difference(ours.printed, peer.printed):
                raise SystemExit(f"{path.name}: the two print differently:\n{wrong}")
            rounds.append((ours, peer, load))
        ratios = [
            [getattr(peer, kind) / getattr(ours, kind) for ours, peer, _ in rounds]
            for kind in ("seconds", "cpu")
        ]
        ratio = "{:.1f} ({:.1f})".format(*map(statistics.median, ratios))
        ours, peer, load = (median(list(each)) for each in zip(*rounds, strict=True))
        costs = " | ".join(f"{each.seconds:.1f} ({each.cpu:.1f})" for each in (ours, peer, load))
        print(
            f"| `{path.stem}` | {lines(source)} | {lines(peer_source)} | {costs} | {ratio} |",
            flush=True,
        )
        if options.write:
            figures = (
                f"Midstream: {lines(source)} lines, {ours.cpu:.1f} s of CPU time, the server's "
                "included. TransformerLens: "
                f"{lines(peer_source)} lines, {peer.cpu:.1f} s, of which loading the model "
                f"takes {load.cpu:.1f} s."
            )
            notebook.cells[-1].source, found = FIGURES.subn(figures, notebook.cells[-1].source)
            assert found == 1, f"{path.name}: no sentence to write the figures into"
            nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
            for cell in notebook.cells:
                cell.metadata.pop("execution", None)  # times of day
            nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
