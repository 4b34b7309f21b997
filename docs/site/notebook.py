"""Shows a notebook with its outputs as Markdown."""

import json
from typing import Any


def markdown(text: str) -> str:
    """The cells of the notebook `text` (nbformat 4), each code cell followed by its outputs: text,
    and pictures in place.
    """
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            parts += [_fenced(source, "python"), *map(_output, cell["outputs"])]
        else:
            parts.append(source)
    return "\n\n".join(part for part in parts if part) + "\n"


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {"text/plain": output.get("text", "")})
    if "image/png" in data:
        return f"![output](data:image/png;base64,{''.join(data['image/png']).replace(chr(10), '')})"
    return _fenced("".join(data.get("text/plain", "")).rstrip(), "text")


def _fenced(text: str, language: str) -> str:
    return f"`````{language}\n{text}\n`````" if text else ""
