"""Runs the blocks of a documentation page in order, as a reader would paste them, and compares what
they print with the page.

`python` blocks of a page run in one interpreter, `console` and `bash` blocks in one shell; below
`<!-- blocks: NAME -->` begins a part of the page, whose blocks run in another pair of them. In a
`console` block each `$ ` line is a command (with the lines that complete it), and what follows is
its output. A `text` block right after a `python` block is what that one prints. A block below `<!--
not run: reason -->` is left out.

What is printed is compared without white space. `…` stands for anything; ids, hex digests, numbers
of four digits and more, numbers with decimals, bars and lines stand for any of their kind. Headers
that the page leaves out of an HTTP answer may be there. A command whose output is not shown has to
end with 0.

    python tools/pages/docs_page.py docs/steering.md …    # beside `make up`, on its default port

`tests/long/test_docs_pages.py` runs all pages on a stack of its own.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(
    (
        r"^(?:<!-- not run: (?P<reason>[^\n]+?) "
        r"-->\n+)?^```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^```$"
    ),
    re.MULTILINE | re.DOTALL,
)
PART = re.compile(r"^<!-- blocks: (?P<name>[a-z-]+) -->$", re.MULTILINE)
PYTHON = "python"
SHELL = ("console", "bash", "sh")
OUTPUT = "text"
#: What differs between two runs of one command, most special first → what it may be.
VARIES = [
    (r"[0-9A-Za-z_]*…[0-9A-Za-z_]*", r".*?"),  # also within an id
    (r"[─━]{3,}", r"[─━]+"),
    (r"[▁▂▃▄▅▆▇█░▒▓]{3,}", r"[▁▂▃▄▅▆▇█░▒▓]+"),
    (r"^ +0(?: +\d+){3,}$", r"0\d+"),  # an axis, as wide as the terminal
    # a clone names its commit
    (r"(?<=midstream )0\.1\.0\b", r"0\.1\.0(?:\+[0-9a-z.-]+)?"),
    (r"(?<=server )0\.1\.0\b", r"0\.1\.0(?:\+[0-9a-z.-]+)?"),
    (r"(?:job|ms|msg|run)_[0-9a-zA-Z_]{2,}", r"(?:job|ms|msg|run)_[0-9a-zA-Z_]+"),
    (r"(?<!\d)\d{13}-\d+", r"\d{13}-\d+"),  # of an event: what comes in one millisecond is counted
    (r"(?<![0-9A-Za-z])[0-9a-f]{8,}(?![0-9A-Za-z])", r"[0-9a-f]{8,}"),
    # what ran before
    (
        r'"(?:step|actions|offset|version|global_version|seconds)":\d+(?:\.\d+)?',
        r'"\w+":\d+(?:\.\d+)?',
    ),
    # an engine without other work takes a job at once
    (
        r'"state":"queued","attempt":0',
        r'"state":"(?:queued","attempt":0|running","attempt":1)',
    ),
    (
        r'"queued":\d+\.\d+,"capture_status":"pending"',
        (
            r'"queued":\d+\.\d+,(?:"started":\d+\.\d+,"worker":"[^"]+",)?'
            r'"capture_status":"pending"(?:,"receipts_expected":\d+)?'
        ),
    ),
    (r'"cells_expected":300}$', r'"cells_expected":300(?:,"global_version":\d+)?}'),
    (r'"prompts":1}$', r'"prompts":1(?:,"global_version":\d+)?}'),
    (r'etag: "\d+"', r'etag:"\d+"'),
    (r"-?\d+(?:\.\d*(?:[eE][-+]?\d+)?|[eE][-+]?\d+)", r"-?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?"),
    (r"\d{4,}", r"\d+"),
]
_VARIES = re.compile("|".join(f"({shown})" for shown, _ in VARIES), re.MULTILINE)
#: A rank's receipt can be the faster one.
_RECEIPT_FIRST = re.compile(
    r"^(id: \S+\nevent: receipt\n.*\n\n)(id: \S+\nevent: output\n.*\n\n)", re.MULTILINE
)
_DONE = "midstream-command-over"


@dataclass(frozen=True)
class Block:
    """A fenced block. `reason`: why it is not run; empty: it is."""

    line: int
    language: str
    body: str
    reason: str

    @property
    def runs(self) -> bool:
        return not self.reason and self.language in (PYTHON, *SHELL)


@dataclass
class Page:
    """The blocks of a page or of a part, run one after the other. `wrong`: what did not go as the
    page says.
    """

    path: Path
    text: str
    cwd: Path
    environment: dict[str, str]
    wrong: list[str] = field(default_factory=list)
    ran: int = 0

    def run(self) -> list[str]:
        found = list(blocks(self.text))
        with (
            _Shell(self.cwd, self.environment) as shell,
            _Python(self.cwd, self.environment) as python,
        ):
            for block, after in zip(found, [*found[1:], None], strict=True):
                if block.runs and block.language in SHELL:
                    self._shell(shell, block)
                elif block.runs:
                    shown = after.body if after is not None and after.language == OUTPUT else ""
                    self._python(python, block, shown)
        return self.wrong

    def _shell(self, shell: "_Shell", block: Block) -> None:
        for command, shown in commands(block):
            self.ran += 1
            code, printed = shell.run(command)
            if shown.strip():
                self._compare(block.line, command, shown, printed)
            elif code:
                self.wrong.append(
                    f"{self.path.name}:{block.line}: `{command}` ended with {code}:\n{printed}"
                )

    def _python(self, python: "_Python", block: Block, shown: str) -> None:
        self.ran += 1
        failed, printed = python.run(block.body)
        if failed:
            self.wrong.append(f"{self.path.name}:{block.line}: raises\n{printed}{failed}")
        elif shown:
            self._compare(block.line, block.body.strip().partition("\n")[0] + " …", shown, printed)

    def _compare(self, line: int, command: str, shown: str, printed: str) -> None:
        # an event stream that is slow
        printed = re.sub(r"^: ping\n+", "", printed, flags=re.MULTILINE)
        printed = _RECEIPT_FIRST.sub(r"\2\1", printed)
        if not pattern_of(shown).fullmatch(_dense(_headers_shown(printed, shown))):
            self.wrong.append(
                f"{self.path.name}:{line}: `{command}` prints\n{printed}\nand the page "
                f"shows\n{shown}"
            )


def blocks(text: str) -> Iterator[Block]:
    for fence in FENCE.finditer(text):
        line = text.count("\n", 0, fence.start("language")) + 1
        yield Block(line, fence["language"], fence["body"], fence["reason"] or "")


def commands(block: Block) -> Iterator[tuple[str, str]]:
    """(Command, the output that is shown) of each in a block."""
    if block.language != "console":
        yield block.body, ""
        return
    lines = block.body.splitlines()
    at = 0
    while at < len(lines):
        if not lines[at].startswith("$ "):
            raise ValueError(f"line {block.line}: a console block begins with `$ `: {lines[at]!r}")
        command = lines[at][2:]
        at += 1
        while at < len(lines) and not _complete(command):
            command = f"{command}\n{lines[at]}"
            at += 1
        begin = at
        while at < len(lines) and not lines[at].startswith("$ "):
            at += 1
        yield command, "\n".join(lines[begin:at])


def _complete(command: str) -> bool:
    if command.endswith("\\"):
        return False
    checked = subprocess.run(
        ["bash", "-n"], input=command, capture_output=True, text=True, check=False
    )
    return checked.returncode == 0 and "here-document" not in checked.stderr


def pages() -> list[tuple[Path, str]]:
    """The pages, below the repository's root, and their parts with blocks to run."""
    own = [*(ROOT / "docs").glob("*.md"), *ROOT.glob("packages/*/docs/*.md")]
    found = [ROOT / "README.md", *sorted(own)]
    return [(path.relative_to(ROOT), part) for path in found for part in parts(path)]


def parts(path: Path) -> dict[str, str]:
    """The text of each part of a page that has blocks to run; a page's first part has its name.
    Lines keep their numbers.
    """
    text = path.read_text()
    begins = [(path.stem, 0), *((found["name"], found.start()) for found in PART.finditer(text))]
    ends = [*(begin for _, begin in begins[1:]), len(text)]
    found = {
        name: "\n" * text.count("\n", 0, begin) + text[begin:end]
        for (name, begin), end in zip(begins, ends, strict=True)
    }
    return {name: part for name, part in found.items() if any(each.runs for each in blocks(part))}


def pattern_of(shown: str) -> re.Pattern[str]:
    """What a run may print where the page shows this."""
    parts = []
    at = 0
    for found in _VARIES.finditer(shown):
        assert found.lastindex is not None
        parts += [re.escape(_dense(shown[at : found.start()])), VARIES[found.lastindex - 1][1]]
        at = found.end()
    return re.compile("".join([*parts, re.escape(_dense(shown[at:]))]), re.DOTALL)


def _headers_shown(printed: str, shown: str) -> str:
    """An HTTP answer without those headers that the page leaves out."""
    if not printed.startswith("HTTP/1.1"):
        return printed
    head, blank, body = re.sub(r"\r", "", printed).partition("\n\n")
    first, *headers = head.splitlines()
    named = {line.partition(":")[0].lower() for line in shown.partition("\n\n")[0].splitlines()}
    return (
        "\n".join([first, *(line for line in headers if line.partition(":")[0].lower() in named)])
        + blank
        + body
    )


def _dense(text: str) -> str:
    return re.sub(r"\s+", "", text)


class _Python:
    """One interpreter that keeps its variables from block to block."""

    def __init__(self, cwd: Path, environment: dict[str, str]):
        self._process = subprocess.Popen(
            [sys.executable, "-c", _INTERPRETER],
            cwd=cwd,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __enter__(self) -> "_Python":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=60)

    def run(self, block: str) -> tuple[str, str]:
        """The traceback, if it raised, and what it printed."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(block) + "\n")
        self._process.stdin.flush()
        failed, printed = json.loads(self._process.stdout.readline())
        return failed, printed


#: Reads blocks as JSON lines, answers each with its traceback and what it printed.
_INTERPRETER = """
import contextlib, io, json, sys, traceback
answers, names = sys.stdout, {"__name__": "__main__"}
for line in sys.stdin:
    printed, failed = io.StringIO(), ""
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile(json.loads(line), "<block>", "exec"), names)
        except Exception:
            failed = traceback.format_exc()
    answers.write(json.dumps([failed, printed.getvalue()]) + "\\n")
    answers.flush()
"""


class _Shell:
    """One bash that keeps its variables from command to command."""

    def __init__(self, cwd: Path, environment: dict[str, str]):
        self._process = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=cwd,
            env=environment,
            text=True,
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def __enter__(self) -> "_Shell":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write("kill $(jobs -p) 2>/dev/null; wait\n")
        self._process.stdin.close()
        self._process.wait(90)
        self._process.stdout.close()

    def run(self, command: str) -> tuple[int, str]:
        """Its exit code, and what it printed on both streams."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{command}\n__code=$?; echo; echo {_DONE} $__code\n")
        self._process.stdin.flush()
        lines = []
        for line in self._process.stdout:
            if line.startswith(_DONE):
                return int(line.split()[1]), "".join(lines)
            lines.append(line)
        raise AssertionError(f"the shell ended at {command!r}:\n{''.join(lines)}")


def environment_of(url: str, data: Path) -> dict[str, str]:
    """What finds the stack at `url`, whose data are in `data`."""
    own = {
        "MIDSTREAM_API_PORT": url.rpartition(":")[2],
        "MIDSTREAM_DATA_DIR": str(data),
        "COLUMNS": "80",
    }
    (data / "docs-curl").mkdir(parents=True, exist_ok=True)
    # No progress meter, as on a terminal. An answer of 400 or more gives an exit code, which counts
    # where no answer is shown.
    (data / "docs-curl" / ".curlrc").write_text("silent\nfail-with-body\n")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    quiet = {
        "NO_COLOR": "1",
        "PAGER": "cat",
        "MPLBACKEND": "Agg",
        "CURL_HOME": str(data / "docs-curl"),
    }
    return {**os.environ, **own, **quiet, "PATH": path}


def main() -> None:
    environment = environment_of("http://127.0.0.1:8321", ROOT / ".midstream")
    wrong = []
    for path in map(Path, sys.argv[1:]):
        for part in parts(path).values():
            wrong += Page(path, part, ROOT, environment).run()
    sys.exit("\n\n".join(wrong))


if __name__ == "__main__":
    main()
