"""Says how long `make test` takes on this machine.

`python tests/pace.py` prints the seconds of the last whole run in this clone; before the first, an
estimate from a sample of work, which is timed once. `python tests/pace.py SECONDS` keeps what a
whole run took. Both are in `.cache/test/pace.json`.
"""

import ast
import json
import sys
import time
from pathlib import Path

FILE = Path(__file__).parent.parent / ".cache" / "test" / "pace.json"
#: Seconds of the sample, and of `make test` beside nothing else, on the two cores on which the
#: figures of docs/developing.md were measured.
SAMPLE_S = 0.9
RUN_S = 560.0


def sample() -> float:
    """Seconds of processor time for what most of the tests' processes do: run Python."""
    text = Path(ast.__file__).read_text()
    began = time.process_time()
    for _ in range(40):
        compile(ast.parse(text), "ast.py", "exec")
    return time.process_time() - began


def read() -> dict[str, float]:
    return dict(json.loads(FILE.read_text())) if FILE.exists() else {}


def keep(facts: dict[str, float]) -> None:
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(json.dumps(facts))


def say() -> str:
    facts = read()
    if "took" in facts:
        return f"takes about {facts['took']:.0f} s here, as its last whole run did"
    if "sample" not in facts:
        facts["sample"] = sample()
        keep(facts)
    seconds = RUN_S * facts["sample"] / SAMPLE_S
    return f"takes about {seconds:.0f} s on two idle cores like these, by a sample of work"


if __name__ == "__main__":
    if sys.argv[1:]:
        keep(read() | {"took": float(sys.argv[1])})
    else:
        print(f"== `make test` {say()}")
