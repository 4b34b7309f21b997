"""What this processor is able to do."""

from pathlib import Path


def flags() -> frozenset[str]:
    """Its flags, as `/proc/cpuinfo` has them."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())
