"""Runs every GPU benchmark in stages, each of which leaves its result in a file, and renders
RESULTS.md from them.

    python benchmarks/gpu/all.py [--device cpu --tiny] [--out DIR] [--stages kernels,graphs] \\
        [--budget-minutes 25] [--again]
    python benchmarks/gpu/all.py --render [--out DIR]

Needs a GPU and a Python with vLLM; no network, no checkpoint, no Redis. A stage is a process with a
time limit of its own: one that fails or hangs is recorded, and the next goes on. A stage whose
result is there, from the same sources, libraries and device, is not run again. `--device cpu
--tiny` runs the same code with the smallest sizes, which shows that it works and measures nothing.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kit
import render

#: Beyond a stage's own time, in which it stops by itself: then it is killed.
GRACE_S = 45.0
#: A stage is not begun with less than this left.
LEAST_S = 20.0
TAIL = 1500  # characters of a failed stage's log


@dataclass(frozen=True)
class Stage:
    """A program in this folder."""

    program: str
    seconds: float
    arguments: tuple[str, ...] = ()


#: In the order of what matters most, if the time ends.
STAGES: dict[str, Stage] = {
    "kernels": Stage("stage_kernels.py", 240),
    "graphs": Stage("stage_graphs.py", 300),
    "serving-8b": Stage("stage_serving.py", 330, ("--model", "8b")),
    "sweeps": Stage("stage_sweeps.py", 180),
    "timeline": Stage("stage_timeline.py", 150),
    "serving-70b-shard": Stage("stage_serving.py", 270, ("--model", "70b-shard")),
    "serving-30b-a3b": Stage("stage_serving.py", 200, ("--model", "30b-a3b")),
    "pipeline": Stage("stage_pipeline.py", 200),
}
#: With the smallest model every one of those is the same: one stands for all.
TINY = ("kernels", "graphs", "serving-8b", "sweeps", "timeline", "pipeline")


def run(
    name: str, stage: Stage, asked: argparse.Namespace, key: str, seconds: float
) -> dict[str, Any]:
    """The stage's record: `status` ok, skipped or failed, with its result or what went wrong."""
    result, log = asked.out / f"{name}.result", asked.out / "logs" / f"{name}.log"
    result.unlink(missing_ok=True)
    command = [
        sys.executable,
        str(kit.HERE / stage.program),
        "--device",
        asked.device,
        "--out",
        str(asked.out / "work" / name),
        "--json",
        str(result),
        "--seconds",
        str(seconds),
        *stage.arguments,
        *(["--tiny"] if asked.tiny else []),
    ]
    began = time.time()
    with log.open("wb") as into:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=into,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        wrong = ""
        try:
            if code := process.wait(seconds + GRACE_S):
                wrong = f"ended with {code}"
        except subprocess.TimeoutExpired:
            wrong = f"did not end within {seconds + GRACE_S:.0f} s"
        finally:
            end_group(process)
    record: dict[str, Any] = {
        "stage": name,
        "key": key,
        "tiny": asked.tiny,
        "at": began,
        "seconds": round(time.time() - began, 1),
    }
    if result.exists():  # also of a stage that hung afterwards
        told = json.loads(result.read_text())
        result.unlink()
        return record | {
            "status": "skipped" if "skipped" in told else "ok",
            "machine": kit.machine(asked.device),
            **told,
        }
    return record | {
        "status": "failed",
        "error": wrong or "left no result",
        "log": log.read_text(errors="replace")[-TAIL:],
    }


def end_group(process: "subprocess.Popen[bytes]") -> None:
    """The stage and every process that it left."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def run_all(stages: dict[str, Stage], asked: argparse.Namespace) -> list[str]:
    """Names of the stages that failed."""
    (asked.out / "logs").mkdir(parents=True, exist_ok=True)
    deadline, failed = time.monotonic() + 60 * asked.budget_minutes, []
    key = kit.source_hash(device=asked.device, tiny=asked.tiny)
    for name, stage in stages.items():
        path = asked.out / f"{name}.json"
        if not asked.again and path.exists():
            known = json.loads(path.read_text())
            if known["key"] == key and known["status"] != "failed":
                print(f"{name}: {known['status']} before, not run again", flush=True)
                continue
        left = deadline - time.monotonic() - GRACE_S
        if left < LEAST_S:
            print(
                (
                    f"{name}: not run, the {asked.budget_minutes:g} minutes are over "
                    "(--budget-minutes)"
                ),
                flush=True,
            )
            continue
        print(f"{name}: …", end="", flush=True)
        record = run(name, stage, asked, key, min(stage.seconds, left))
        aside = path.with_suffix(".part")
        aside.write_text(json.dumps(record, indent=1))
        aside.rename(path)
        print(
            (
                f"\r{name}: {record['status']} in {record['seconds']:.0f} s "
                f"{record.get('skipped') or record.get('error', '')}"
            ),
            flush=True,
        )
        failed += [name] * (record["status"] == "failed")
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="the smallest sizes; required with --device cpu"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(".cache") / "gpu",
        help="folder of results and logs (default: %(default)s)",
    )
    parser.add_argument("--stages", help=f"some of {','.join(STAGES)}; default: all")
    parser.add_argument(
        "--budget-minutes",
        type=float,
        default=25.0,
        help="no stage is begun after this (default: %(default)s)",
    )
    parser.add_argument(
        "--again", action="store_true", help="run stages whose results are there, too"
    )
    parser.add_argument(
        "--render", action="store_true", help="render the results that are there, and run nothing"
    )
    parser.add_argument(
        "--results",
        type=Path,
        help="the page to write; default: RESULTS.md beside this file, on a CPU in --out",
    )
    asked = parser.parse_args()
    if asked.device == "cpu" and not asked.tiny:
        parser.error("--device cpu needs --tiny: the real sizes take hours there")
    names = asked.stages.split(",") if asked.stages else [*(TINY if asked.tiny else STAGES)]
    if unknown := set(names) - set(STAGES):
        parser.error(f"no such stage: {', '.join(sorted(unknown))}; stages: {', '.join(STAGES)}")
    asked.out = asked.out.resolve()
    failed = (
        []
        if asked.render
        else run_all({name: STAGES[name] for name in STAGES if name in names}, asked)
    )
    page = asked.results or (asked.out if asked.device == "cpu" else kit.HERE) / "RESULTS.md"
    page.write_text(render.page([*STAGES], render.read(asked.out, [*STAGES])))
    print(f"written: {page}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
