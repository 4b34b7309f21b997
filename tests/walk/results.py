"""The results of the walk: one JSON line per class."""

import fcntl
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

RESULTS = Path(__file__).with_name("results.jsonl")


@dataclass(frozen=True)
class Result:
    """What became of one class. `outcome`: served, laws (served, without a reference), differs, refused, or not made."""

    name: str
    outcome: str
    why: str = ""  # of what is not served
    served_by: str = ""  # vLLM's file, or its Transformers backend
    dtype: str = "float32"
    hooks: list[str] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    figure: float | None = None  # the worst of all hooks, as `fidelity_page.Figure` defines them
    figures: dict[str, str] = field(default_factory=dict)
    caveats: list[str] = field(default_factory=list)
    note: str = ""
    seconds: float = 0.0
    vllm: str = ""
    transformers: str = ""


def read() -> dict[str, Result]:
    """Name → result, in the order of names."""
    if not RESULTS.exists():
        return {}
    return {result.name: result for line in RESULTS.read_text().splitlines() if (result := Result(**json.loads(line)))}


def keep(result: Result) -> None:
    """Put the result in the place of an older one; several processes may."""
    with open(RESULTS.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        every = read() | {result.name: result}
        part = RESULTS.with_suffix(".part")
        part.write_text("".join(json.dumps(asdict(every[name]), sort_keys=True) + "\n" for name in sorted(every)))
        part.replace(RESULTS)
