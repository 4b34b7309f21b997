"""Makes the packages of the repository known where none is installed: links to their code, and
metadata with their entry points, in `.cache/docs/package`.
"""

import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".cache" / "docs" / "package"


def declare(folder: Path, project: dict[str, Any]) -> None:
    """Write a distribution's metadata, as an installer would."""
    module = project["name"].replace("-", "_")
    info = FOLDER / f"{module}-{project['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    head = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(head)
    lines = []
    for group, offers in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in offers.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    link = FOLDER / module
    link.unlink(missing_ok=True)
    link.symlink_to(folder / module)


if __name__ == "__main__":
    for file in sorted(ROOT.glob("packages/*/pyproject.toml")):
        declare(file.parent, tomllib.loads(file.read_text())["project"])
