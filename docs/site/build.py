"""Builds the documentation as a site: writes its pages to `.cache/docs/source`, has zensical render
them, and puts the result in `.cache/site`, complete without any other host.

The navigation is the index, `docs/README.md`. Pages that are no files of `docs/` are the references
and the files of the repository that pages link to.
"""

import hashlib
import json
import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools" / "pages"))
sys.path.insert(0, str(Path(__file__).parent))

import notebook
import reference

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / ".cache" / "docs"
INDEX = "docs/README.md"
#: Pages that the build writes, at the end of their section: section → page → its Markdown.
GENERATED: dict[str, dict[str, Callable[[], str]]] = {
    "Reference": {
        "reference/python.md": reference.python,
        "reference/cli.md": reference.cli,
        "reference/http.md": reference.http,
    }
}
#: Files whose text has links that are followed.
PROSE = (".md", ".ipynb")
#: Pages that the search leaves out, so that it finds guides: they are reached by links.
UNSEARCHED = ("docs/decisions/", "benchmarks/RESULTS.md", "CHANGELOG.md")
EXCLUDED = "---\nsearch:\n  exclude: true\n---\n"
OWN_PAGE = re.compile(r"(?:packages/\w+/)?docs/(?P<page>.+)")
FENCE = re.compile(r"^(?P<mark>`{3,}).*?^(?P=mark) *$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?P<text>!?\[[^\]]*\])\((?P<path>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")
SECTION = re.compile(r"^## (.+)\n((?:(?!## ).*\n?)*)", re.MULTILINE)
SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)
#: Where zensical loads the script from that makes search work in files.
SHIM = "https://unpkg.com/iframe-worker/shim"


def uri(path: str) -> str:
    """The page of the site that shows `path`, a file of the repository; one of a package stands
    beside those of `docs/`.
    """
    if own := OWN_PAGE.fullmatch(path):
        return own["page"]
    page = "overview.md" if path == "README.md" else path
    return f"repository/{page}" if page.endswith(".md") else f"repository/{page}.md"


def targets(text: str, path: str) -> list[str]:
    """Files of the repository that the Markdown `text` of the file `path` links to, in order."""
    found = [_target(link, path) for link in LINK.finditer(FENCE.sub("", text))]
    return list(dict.fromkeys(target for target in found if (ROOT / target).is_file()))


def _target(link: re.Match[str], path: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link["path"]))


def navigation() -> dict[str, list[str]]:
    """The sections of the index with the pages that they link to."""
    index = (ROOT / INDEX).read_text()
    sections = {
        title: [uri(path) for path in targets(text, INDEX) if uri(path).endswith(".md")]
        for title, text in SECTION.findall(index)
    }
    return {title: [*pages, *GENERATED.get(title, ())] for title, pages in sections.items()}


def pages() -> dict[str, str]:
    """Every page of the site with its Markdown: those of `docs/`, the references and, from link to
    link, every file outside `docs/` that a page leads to.
    """
    found = {page: write() for section in GENERATED.values() for page, write in section.items()}
    waiting = [str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        text = _shown(path)
        found[uri(path)] = _front(path) + (_moved(text, path) if path.endswith(PROSE) else text)
        if path.endswith(PROSE):
            outside = {
                target for target in targets(text, path) if not target.startswith("docs/")
            } - seen
            waiting += outside
            seen |= outside
    return found


def _front(path: str) -> str:
    return EXCLUDED if path.startswith(UNSEARCHED) or not path.endswith(PROSE) else ""


def _shown(path: str) -> str:
    """A file of the repository as Markdown."""
    text = (ROOT / path).read_text()
    if path.endswith(".md"):
        return text
    if path.endswith(".ipynb"):
        return notebook.markdown(text)
    return f"# `{path}`\n\n`````{Path(path).suffix.removeprefix('.')}\n{text}\n`````\n"


def _moved(markdown: str, path: str) -> str:
    """Leads links to files of the repository to their pages; those to folders outside `docs/`
    become text.
    """

    def moved(link: re.Match[str]) -> str:
        target = _target(link, path)
        if (ROOT / target).is_dir():
            return link["text"][1:-1]
        there = posixpath.relpath(uri(target), posixpath.dirname(uri(path)) or ".")
        return f"{link['text']}({there}{link['anchor'] or ''})"

    parts, at = [], 0
    for fence in [*FENCE.finditer(markdown), None]:
        end = fence.start() if fence else len(markdown)
        parts += [LINK.sub(moved, markdown[at:end]), fence[0] if fence else ""]
        at = fence.end() if fence else end
    return "".join(parts)


def local(page: str, name: str) -> tuple[str, dict[str, str]]:
    """The HTML `page` of the file `name` without inline scripts, which the API's policy forbids,
    and without other hosts; and the scripts that it now loads, by name.
    """
    up = "../" * name.count("/")
    scripts: dict[str, str] = {}

    def stored(script: re.Match[str]) -> str:
        file = f"assets/{hashlib.sha256(script[1].encode()).hexdigest()[:16]}.js"
        scripts[file] = script[1]
        return f'<script src="{up}{file}"></script>'

    return SCRIPT.sub(stored, page.replace(SHIM, f"{up}assets/iframe-worker.js")), scripts


def main() -> None:
    source, site = WORK / "source", WORK / "site"
    shutil.rmtree(source, ignore_errors=True)
    ignored = shutil.ignore_patterns("site", "*.md")
    shutil.copytree(ROOT / "docs", source, ignore=ignored)  # pictures, routes.txt
    (source / "openapi.json").write_bytes(reference.openapi())
    for page, text in pages().items():
        (source / page).parent.mkdir(parents=True, exist_ok=True)
        (source / page).write_text(text)
    sections = ", ".join(
        f"{{{json.dumps(title)} = {json.dumps(listed)}}}" for title, listed in navigation().items()
    )
    here = Path(__file__).parent
    settings = (here / "zensical.toml").read_text()
    (WORK / "zensical.toml").write_text(
        settings.replace("[project]\n", f'[project]\nnav = ["README.md", {sections}]\n', 1)
    )
    zensical = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    if subprocess.run(zensical, cwd=WORK).returncode:
        raise SystemExit("the site was not built")
    for file in site.rglob("*.html"):
        text, scripts = local(file.read_text(), str(file.relative_to(site)))
        file.write_text(text)
        for name, script in scripts.items():
            (site / name).write_text(script)
    for file in (here / "iframe-worker").iterdir():
        shutil.copy(file, site / "assets" / file.name)
    shutil.rmtree(ROOT / ".cache" / "site", ignore_errors=True)
    site.rename(ROOT / ".cache" / "site")


if __name__ == "__main__":
    main()
