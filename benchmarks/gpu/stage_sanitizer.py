"""A few launches of the site kernels under compute-sanitizer: memory errors, races, reads of
memory that nothing wrote.

The last stage: each launch takes a hundred times as long there. With `--model launches` it is what
runs under the tool. Where there is no tool, the launches run without.
"""

import shutil
import subprocess
import sys
from typing import Any

import kit

#: What compute-sanitizer ends with if it found an error.
FOUND = 9
TOOLS = ("memcheck", "racecheck", "initcheck")
#: (width, tokens)
SHAPES = ((37, 3), (576, 5))


def launched(asked: kit.Options, *under: str) -> tuple[int | None, str]:
    """The exit code of the launches under a tool, None if they did not end in time; the output."""
    command = [sys.executable, __file__, "--device", asked.device, "--model", "launches"]
    try:
        done = subprocess.run(
            [*under, *command, *["--tiny"] * asked.tiny],
            capture_output=True,
            text=True,
            timeout=max(10.0, asked.left),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, done.stdout + done.stderr


def main() -> None:
    asked = kit.options(__doc__)
    if asked.model == "launches":
        import stage_kernels

        print(stage_kernels.check_against_reference(SHAPES[: 1 if asked.tiny else None]))
        return
    result: dict[str, Any] = {"figures": {}, "notes": []}
    sanitizer = shutil.which("compute-sanitizer") if asked.gpu else None
    if sanitizer is None:
        code, told = launched(asked)
        assert code == 0, told[-3000:]
        kit.finish(asked, {"skipped": "there is no compute-sanitizer; the launches ran without"})
        return
    clean = 0
    for tool in TOOLS:
        code, told = launched(asked, sanitizer, "--tool", tool, "--error-exitcode", str(FOUND))
        clean += code == 0
        wrong = "did not end in time" if code is None else f"ended with {code}: {told[-600:]}"
        result["notes"].append(f"{tool}: {wrong if code != 0 else 'no errors'}")
        result["figures"]["clean"] = {"value": clean}
        kit.so_far(asked, result)
    kit.finish(asked, result)


if __name__ == "__main__":
    main()
