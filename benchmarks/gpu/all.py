"""Runs every GPU benchmark in stages, each of which leaves its result in a file, and renders
RESULTS.md from them.

    python benchmarks/gpu/all.py [--device cpu --tiny] [--out DIR] [--stages kernels,graphs] \\
        [--budget SECONDS] [--again]
    python benchmarks/gpu/all.py --render [--out DIR]

Needs a GPU and a Python with vLLM; no network, no checkpoint, no Redis. A stage is a process with a
time limit of its own: one that fails or hangs is recorded, and the next goes on. A stage whose
result is there, from the same sources, libraries and device, is not run again. Where a command may
take less time than all of them, give that as the budget and run the command again: it goes on with
the stages that are missing. A stage that was killed, with or without this program, begins again;
no process of it is left (`keeper.py`). `--device cpu --tiny` runs the same code with the smallest
sizes, which shows that it works and measures nothing.
"""

import argparse
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keeper
import kit
import render

#: Beyond a stage's own time, in which it stops by itself: then it is killed.
GRACE_S = 30.0
#: A stage is not begun with less than this share of its time.
LEAST = 0.7
#: Seconds of all stages together, and of what lies between them.
BUDGET_S = 22 * 60.0
#: What a CPU takes longer, with the smallest sizes.
CPU_FACTOR = 4.0
TAIL = 1500  # characters of a failed stage's log


@dataclass(frozen=True)
class Stage:
    """A program in this folder."""

    program: str
    seconds: float
    arguments: tuple[str, ...] = ()


#: In the order of what matters most, if the time ends. The first three fit into ten minutes.
STAGES: dict[str, Stage] = {
    "smoke": Stage("stage_smoke.py", 90),
    "why": Stage("stage_why.py", 190),
    "kernels": Stage("stage_kernels.py", 100),
    "graphs": Stage("stage_graphs.py", 160),
    "why-70b-shard": Stage("stage_why.py", 130, ("--model", "70b-shard")),
    "why-30b-a3b": Stage("stage_why.py", 110, ("--model", "30b-a3b")),
}


def run(
    name: str, stage: Stage, asked: argparse.Namespace, key: str, seconds: float
) -> dict[str, Any]:
    """The stage's record: `status` ok, skipped or failed, with its result or what went wrong."""
    log = asked.out / "logs" / f"{name}.log"
    work = asked.out / "work" / name
    shutil.rmtree(work, ignore_errors=True)
    (asked.out / f"{name}.result").unlink(missing_ok=True)
    record: dict[str, Any] = {"stage": name, "key": key, "tiny": asked.tiny, "at": time.time()}
    record |= {"seconds": 0.0, "status": "running"}
    kit.leave(asked.out / f"{name}.json", json.dumps(record))
    command = [
        sys.executable,
        str(kit.HERE / "keeper.py"),
        str(os.getpid()),
        sys.executable,
        str(kit.HERE / stage.program),
        "--device",
        asked.device,
        "--out",
        str(work),
        "--json",
        str(asked.out / f"{name}.result"),
        "--seconds",
        str(seconds),
        *stage.arguments,
        *(["--tiny"] if asked.tiny else []),
    ]
    with log.open("wb") as into:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=into,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=[asked.lock.fileno()],
        )
        wrong = ""
        try:
            if code := process.wait(seconds + GRACE_S):
                wrong = f"ended with {code}"
        except subprocess.TimeoutExpired:
            wrong = f"did not end within {seconds + GRACE_S:.0f} s"
        finally:
            end(process)
            shutil.rmtree(kit.memory_folder(work), ignore_errors=True)
    return settled(name, asked, record, time.time(), wrong)


def settled(
    name: str, asked: argparse.Namespace, record: dict[str, Any], ended: float, wrong: str
) -> dict[str, Any]:
    """Keeps the record of a stage that has ended, with what it has left. `wrong`: how it ended."""
    result = asked.out / f"{name}.result"
    log = asked.out / "logs" / f"{name}.log"
    record |= {"seconds": round(ended - record["at"], 1), "status": "ok"}
    told: dict[str, Any] = {"partial": True}
    if result.exists():  # also of a stage that hung afterwards
        told = json.loads(result.read_text())
        result.unlink()
        record["machine"] = kit.machine(asked.device)
    unfinished = told.pop("partial", False)
    if "skipped" in told:
        record["status"] = "skipped"
    elif error := told.pop("wrong", "") or (unfinished and (wrong or "left no result")):
        text = log.read_text(errors="replace")[-TAIL:] if log.exists() else ""
        record |= {"status": "failed", "error": error, "log": text}
    record |= told
    kit.leave(asked.out / f"{name}.json", json.dumps(record, indent=1))
    return record


def last_sign(name: str, asked: argparse.Namespace) -> float:
    """When a stage that was killed with this program last wrote something."""
    files = asked.out / f"{name}.json", asked.out / f"{name}.result"
    return max(path.stat().st_mtime for path in files if path.exists())


def end(process: "subprocess.Popen[bytes]") -> None:
    """The stage's keeper ends the stage and all that it started, then itself."""
    process.terminate()
    try:
        process.wait(keeper.ENDING_S + 5)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_all(stages: dict[str, Stage], asked: argparse.Namespace) -> list[str]:
    """Names of the stages that failed."""
    (asked.out / "logs").mkdir(parents=True, exist_ok=True)
    deadline = kit.STARTED + asked.budget
    failed = []
    # Held by the keeper of a stage, too: what a killed run left has ended when this is free.
    asked.lock = (asked.out / "lock").open("w")
    fcntl.flock(asked.lock, fcntl.LOCK_EX)
    key = kit.source_hash(device=asked.device, tiny=asked.tiny)
    for name, stage in stages.items():
        path = asked.out / f"{name}.json"
        known = json.loads(path.read_text()) if path.exists() else None
        if known and known["status"] == "running":  # the program was killed meanwhile
            known = settled(name, asked, known, last_sign(name, asked), "was killed")
        if known and not asked.again and known["key"] == key and known["status"] != "failed":
            print(f"{name}: {known['status']} before, not run again", flush=True)
            continue
        left = deadline - time.monotonic() - GRACE_S
        planned = stage.seconds * (CPU_FACTOR if asked.device == "cpu" else 1)
        if left < LEAST * planned:
            print(
                f"{name}: not run, the budget of {asked.budget:g} s is used up; run the command "
                "again",
                flush=True,
            )
            continue
        print(f"{name}: …", end="", flush=True)
        record = run(name, stage, asked, key, min(planned, left))
        print(
            (
                f"\r{name}: {record['status']} in {record['seconds']:.0f} s "
                f"{record.get('skipped') or record.get('error', '')}"
            ),
            flush=True,
        )
        if record["status"] == "failed":
            failed.append(name)
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
        "--budget",
        type=float,
        default=BUDGET_S,
        metavar="SECONDS",
        help="the command ends within this time (default: %(default)g)",
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
    names = asked.stages.split(",") if asked.stages else [*STAGES]
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
