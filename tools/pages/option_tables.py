"""The tables of options of vLLM in `docs/reference/options.md`, from the lists that the product
reads; `code_tables.py` writes them.
"""

import json
from collections.abc import Iterator

from midstream.workers.engine.options.option_lists import OURS, PROVEN, WRONG
from midstream_ops.serve_flags import (
    ALSO,
    COMMON,
    NO_EFFECT,
    REFUSED,
    SETTINGS,
    SPELLINGS,
    arguments,
    flag,
)


def lists() -> Iterator[str]:
    """Yield the lists of proven and refused options as lines of Markdown."""
    yield "## Proven options"
    yield ""
    yield ", ".join(
        f"`{name}`"
        + (f" ({', '.join(f'`{json.dumps(value)}`' for value in values)})" if values else "")
        for name, values in PROVEN.items()
    )
    yield ""
    yield "## Refused: a setting of Midstream"
    yield ""
    yield "| option | use the setting |"
    yield "|---|---|"
    yield from (f"| `{name}` | {_named(setting)} |" for name, setting in sorted(OURS.items()))
    yield ""
    yield "## Refused: wrong with Midstream"
    yield ""
    yield "| options | reason |"
    yield "|---|---|"
    for reason in dict.fromkeys(WRONG[name] for name in sorted(WRONG)):
        yield (
            f"| {', '.join(f'`{name}`' for name in sorted(WRONG) if WRONG[name] == reason)} "
            f"| {reason} |"
        )


def _named(setting: str) -> str:
    name, _, more = setting.partition(" ")
    return f"`{name}` {more}".rstrip()


def becomes(name: str) -> str:
    """Return what an argument becomes, as Markdown."""
    if name in SETTINGS:
        also = "".join(f", with `{key}={value}`" for key, value in ALSO.get(name, {}).items())
        return f"the setting `{SETTINGS[name]}`{also}"
    if name in NO_EFFECT:
        return f"nothing: {NO_EFFECT[name]}"
    if name in REFUSED:
        return f"refused: {REFUSED[name]}"
    return f"the engine option `{name}`" + ("" if name in PROVEN else ", unproven")


def flags() -> Iterator[str]:
    """Yield the tables of the flags of `vllm serve` as lines of Markdown."""
    shown = (*COMMON, *(name for name in (*SETTINGS, *NO_EFFECT) if name not in COMMON))
    yield "| flag | becomes |"
    yield "|---|---|"
    for name in shown:
        short = f", `{SPELLINGS[name]}`" if name in SPELLINGS else ""
        yield f"| `{flag(name)}`{short} | {becomes(name)} |"
    yield ""
    yield "| refused | why |"
    yield "|---|---|"
    refused = [name for name in arguments() if name in REFUSED and name not in WRONG]
    for reason in dict.fromkeys(map(REFUSED.__getitem__, refused)):
        names = (f"`{flag(name)}`" for name in refused if REFUSED[name] == reason)
        yield f"| {', '.join(names)} | {reason} |"
