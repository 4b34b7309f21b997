"""Runs stock vLLM's own server with the engine options of the settings: the baseline of
`midstream doctor --deep`.

`python -m midstream.workers.engine.proof.stock PORT` translates the settings of the environment to
vLLM's flags, and replaces itself by vLLM's server, so that the process has nothing of Midstream.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from ....schemas.settings.settings import PREFIX, load_settings
from ..options import engine_arguments

SERVER = "vllm.entrypoints.openai.api_server"


def flags(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield vLLM's options as flags of its server."""
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        elif isinstance(value, list | tuple):
            yield from (f"--{flag}", *map(str, value))
        elif value is not None:
            yield f"--{flag}"
            yield json.dumps(value) if isinstance(value, dict) else str(value)


def main(port: str) -> None:
    """Replace this process by vLLM's server on a port of the loopback interface."""
    # a JSON log format would need Midstream's formatter in vLLM's processes
    settings = msgspec.structs.replace(load_settings(), log_format="text")
    engine_arguments.prepare_environment(settings)
    options = {"host": "127.0.0.1", "port": port, **engine_arguments.engine_options(settings)}
    environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    os.execve(sys.executable, [sys.executable, "-P", "-m", SERVER, *flags(options)], environment)


if __name__ == "__main__":
    main(sys.argv[1])
