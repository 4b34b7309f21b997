"""Builds the site's pages that are no files of `docs/`: its navigation, the references, and files
of the repository that pages link to.
"""

import posixpath
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))

import notebook
import reference

ROOT = Path(__file__).resolve().parents[2]
INDEX = "docs/README.md"
#: Pages that the build writes, at the end of their section: section → page → its Markdown.
GENERATED: dict[str, dict[str, Callable[[], str]]] = {
    "Reference": {
        "reference/python.md": reference.python,
        "reference/cli.md": reference.cli,
        "reference/http.md": lambda: reference.http(ROOT / "docs" / "openapi.json"),
    }
}
#: Files whose text has links that are followed.
PROSE = (".md", ".ipynb")
FENCE = re.compile(r"^(?P<mark>`{3,}).*?^(?P=mark) *$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?P<text>!?\[[^\]]*\])\((?P<path>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")
SECTION = re.compile(r"^## (.+)\n((?:(?!## ).*\n?)*)", re.MULTILINE)

#: Page of the site → the file of the repository that it shows.
_origins: dict[str, str] = {}


def slug(title: str, _separator: str = "-") -> str:
    """A heading's anchor as code hosts make it, so that links work there and here."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def uri(path: str) -> str:
    """The page of the site that shows `path`, a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    page = "overview.md" if path == "README.md" else path
    return f"repository/{page}" if page.endswith(".md") else f"repository/{page}.md"


def targets(text: str, path: str) -> list[str]:
    """Files of the repository that the Markdown `text` of the file `path` links to, in order."""
    found = [_target(link, path) for link in LINK.finditer(FENCE.sub("", text))]
    return list(dict.fromkeys(target for target in found if (ROOT / target).is_file()))


def _target(link: re.Match[str], path: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link["path"]))


def navigation() -> list[dict[str, list[str]]]:
    """The sections of the index with the pages that they link to."""
    index = (ROOT / INDEX).read_text()
    sections = {
        title: [uri(path) for path in targets(text, INDEX) if uri(path).endswith(".md")]
        for title, text in SECTION.findall(index)
    }
    return [{title: [*pages, *GENERATED.get(title, ())]} for title, pages in sections.items()]


def on_config(config: Any) -> Any:
    config.nav = ["README.md", *navigation()]
    config.mdx_configs["toc"]["slugify"] = slug
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the references and, from link to link, every file outside `docs/` that a page leads
    to.
    """
    _origins.clear()
    for pages in GENERATED.values():
        for page, write in pages.items():
            files.append(File.generated(config, page, content=write()))
    waiting = [
        f"docs/{file.src_uri}"
        for file in files
        if file.is_documentation_page() and file.abs_src_path
    ]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        text = (ROOT / path).read_text()
        _origins[uri(path)] = path
        if not path.startswith("docs/"):
            files.append(File.generated(config, uri(path), content=_shown(path, text)))
        if path.endswith(PROSE):
            outside = {
                target
                for target in targets(_shown(path, text), path)
                if not target.startswith("docs/")
            } - seen
            waiting += outside
            seen |= outside
    return files


def _shown(path: str, text: str) -> str:
    """A file of the repository as a page."""
    if path.endswith(".md"):
        return text
    if path.endswith(".ipynb"):
        return notebook.markdown(text)
    return (
        "---\nsearch:\n  exclude: true\n---\n# "
        f"`{path}`\n\n`````{Path(path).suffix.removeprefix('.')}\n{text}\n`````\n"
    )


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Leads links to files of the repository to their pages; those to folders outside `docs/`
    become text.
    """
    path = _origins.get(page.file.src_uri)
    if path is None or not path.endswith(PROSE):
        return markdown

    def moved(link: re.Match[str]) -> str:
        target = _target(link, path)
        if (ROOT / target).is_dir():
            return link["text"][1:-1]
        there = posixpath.relpath(uri(target), posixpath.dirname(page.file.src_uri) or ".")
        return f"{link['text']}({there}{link['anchor'] or ''})"

    parts, at = [], 0
    for fence in [*FENCE.finditer(markdown), None]:
        end = fence.start() if fence else len(markdown)
        parts += [LINK.sub(moved, markdown[at:end]), fence[0] if fence else ""]
        at = fence.end() if fence else end
    return "".join(parts)
