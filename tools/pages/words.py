"""Counts the prose of the documentation, for the limits of `tests/unit/tree/test_words.py`.

    python tools/pages/words.py    # the words of each page, and the sum

A word is what stands between white space. Not counted are code blocks and the tables that a tool
writes, which stand between `<!-- table: … -->`, `<!-- written by … -->` or the like and
`<!-- end … -->`; tables that are written by hand are. Design decisions and the changelog are a
record, and no prose that a user has to read.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WRITTEN = re.compile(
    r"<!-- (?:table|written by|costs|carries|runs|plan)\b[^>]*-->.*?<!-- end\b[^>]*-->", re.DOTALL
)
FENCE = re.compile(r"^ *(`{3,}).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
#: The line below a table's head, and what separates its cells.
RULE = re.compile(r"^\|[ :|-]+\|$", re.MULTILINE)
CELL = re.compile(r"(?<!\\)\|")


def pages() -> list[Path]:
    """The pages of the documentation."""
    return sorted([*(ROOT / "docs").glob("*.md"), *ROOT.glob("packages/*/docs/*.md")])


def beside() -> list[Path]:
    """What is read beside the pages: the references' own words, and the files of the root."""
    root = ["README.md", "CONTRIBUTING.md", "benchmarks/RESULTS.md"]
    return [*sorted((ROOT / "docs" / "reference").glob("*.md")), *(ROOT / name for name in root)]


def words(path: Path) -> int:
    """The number of words of prose of a file."""
    text = path.read_text()
    for left_out in (WRITTEN, FENCE, COMMENT, RULE):
        text = left_out.sub("", text)
    return len(CELL.sub(" ", text).split())


def main() -> None:
    counts = {path.relative_to(ROOT): words(path) for path in (*pages(), *beside())}
    for path, count in sorted(counts.items(), key=lambda item: -item[1]):
        print(f"{count:6,} {path}")
    print(
        f"{sum(counts.values()):6,} in {len(pages())} pages and {len(beside())} files beside them"
    )


if __name__ == "__main__":
    main()
