"""Look for secrets in the tree, a part of `make lint`, or with `--history` in all that git has.

Prints places and hashes, never a secret.

What looks like a secret and is none (a sample in a page, a test vector) has its SHA-256 in `KNOWN`.
Burnt secrets may be in the history, where `BURNT` names them, and nowhere else.
"""

import hashlib
import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from midstream.schemas.settings.secret_files import BURNT

ROOT = Path(__file__).resolve().parents[1]
#: SHA-256 of what only looks like a secret.
KNOWN = {
    "3becc34084acfe5c17c59a2043a8c0574663025846d7f4b6b287213f2a2f0b9b": (
        "docs/http.md: a tensor in Base64"
    ),
    "24cfa3d2e4d07084e0d10a50af62849d953c36f8621cde718aea403df01764dd": (
        "docs/keys.md: the key of a stack that was started for the page"
    ),
    "54ab81d44b8ac16b047c4f384dbca656a29994d56c768563b9f12f7e5b330876": (
        "docs/keys.md, earlier: likewise"
    ),
    "126183f1f941bef0a15ff63f9caa1c70cf7f9590870cf62a54f9668e08f5945c": (
        "docs/webhooks.md: a signature"
    ),
    "262333763e54d324e287f95fd295dfa17ac1ce74c80815caa8e0d17bf8db4310": (
        "docs/webhooks.md, earlier: the secret of such a stack"
    ),
    "779a1335df834a6b29b1eb06774988bec1d7e56e3aa19f2df0f5bcf5e69678be": (
        "docs/webhooks.md, earlier: likewise"
    ),
    "80ab4d5d633c9277eea259ea8ef6130310531bc96012375f80fa3466f6ae75c2": (
        "the name of an error of S3"
    ),
    "0c47dd30c7da14ce8078bc464742122187d516456e901ac0c3006dabcec0f743": (
        "the test vector of Standard Webhooks: an id"
    ),
    "f9687cd8cba444e077ceaa14a68c044e686bc6a9cd817724f94a5627e110cfa3": (
        "the test vector of Standard Webhooks: a signature"
    ),
    "ad9a40dae523d1d4bda16219cdd42bbb194407f32c479ac788666e5f63a325a9": (
        "the name of a class of vLLM"
    ),
    "603baf57e2f1f983e263883bbd6f1a0100ac99205932a52f5219cd90473d1534": (
        "docs/openapi.json, earlier: the name of an operation"
    ),
}
#: Secrets by their form: ours, the clouds', the model hubs', keys in PEM, CURVE certificates,
#: passwords in URLs.
FORMS = re.compile(
    rb"ms_[a-z0-9]{12}_[A-Za-z0-9]{43,}|whsec_[A-Za-z0-9+/]{32,}={0,2}|(?:AKIA|ASIA)(?!EXAMPLE)[0-9A-Z]{16}"
    rb"|-----BEGIN [A-Z ]*PRIVATE "
    rb"KEY-----\s+[A-Za-z0-9+/]{40}|gh[pousr]_[A-Za-z0-9]{36}|github_pat_\w{40,}|glpat-[\w-]{20}"
    rb"|hf_[A-Za-z0-9]{30,}|\bsk-[A-Za-z0-9_-]{32,}|\bpypi-[A-Za-z0-9_-]{40,}|\bxox[abpr]-[A-Za-z0-9-]{20,}|eyJ[\w-]{10,}\.eyJ[\w-]{10,}"
    rb"|\bsecret-key\s*=\s*\"[^\"\s]{40}\""
    rb"|(?:secret|password)[\w-]*\s*[=:]\s*[\"']?[A-Za-z0-9+/]{40}(?![A-Za-z0-9+/])|(?<=://)[^/\s:@\"']+:[^/\s@\"'{}<>$]{16,}(?=@)"
)
#: Random text: letters of both cases and digits, without a word's regularity.
RANDOM = re.compile(rb"(?<![\w+/-])[\w+/-]{20,100}={0,2}(?![\w+/-])", re.ASCII)
#: Bits a character, of random text; names and words have less.
ENTROPY = 4.2
#: Digits and capitals that a text with slashes has at least, which is else taken for a path.
OF_A_PATH = 5
#: Files of hashes alone.
HASHES = (".lock",)
#: Folders whose every file is a secret.
FOLDER = re.compile(r"(^|/)secrets/[^/.]+$")


def digest(text: bytes) -> str:
    return hashlib.sha256(text.strip()).hexdigest()


def is_random(text: bytes) -> bool:
    digits = sum(48 <= character < 58 for character in text)
    capitals = sum(65 <= character < 91 for character in text)
    if min(digits, capitals) < (OF_A_PATH if b"/" in text else 1) or text.isupper():
        return False
    return -sum(n / len(text) * math.log2(n / len(text)) for n in Counter(text).values()) > ENTROPY


def secrets_in(path: str, data: bytes) -> Iterator[tuple[int, str]]:
    """Yield (line, SHA-256) of what looks like a secret in a file's contents and is not `KNOWN`."""
    if FOLDER.search(path):
        yield 1, digest(data)
        return
    if path.endswith(HASHES) or b"\0" in data:
        return
    forms = [(found.start(), found.end()) for found in FORMS.finditer(data)]
    texts = [
        (found.start(), found.end())
        for found in RANDOM.finditer(data)
        if is_random(found.group())
        and not any(start < found.end() and found.start() < end for start, end in forms)
    ]
    for start, end in sorted(forms + texts):
        if (name := digest(data[start:end])) not in KNOWN:
            yield data.count(b"\n", 0, start) + 1, name


def _git(*command: str, sent: bytes = b"") -> bytes:
    return subprocess.run(
        ["git", *command], cwd=ROOT, input=sent, capture_output=True, check=True
    ).stdout


def tree() -> Iterator[tuple[str, bytes]]:
    """Yield path and contents of the files that git has or would take."""
    for line in _git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split(b"\0"):
        if line and (ROOT / line.decode()).is_file():
            yield line.decode(), (ROOT / line.decode()).read_bytes()


def history() -> Iterator[tuple[str, bytes]]:
    """Yield path and contents of every version of every file, and every commit's text, of all
    branches and tags.
    """
    paths: dict[bytes, str] = {}
    for line in _git("rev-list", "--objects", "--all").splitlines():
        name, _, path = line.partition(b" ")
        paths.setdefault(name, path.decode(errors="replace"))
    answer = _git("cat-file", "--batch", sent=b"\n".join(paths))
    at = 0
    while at < len(answer):
        end = answer.index(b"\n", at)
        name, kind, size = answer[at:end].split()
        at = end + 1
        if kind != b"tree":
            yield paths[name] or name.decode()[:12], answer[at : at + int(size)]
        at += int(size) + 1


def faults(files: Iterable[tuple[str, bytes]], allowed: Iterable[str] = ()) -> Iterator[str]:
    """Yield a line for each secret, at its first place, whose SHA-256 is not in `allowed`."""
    seen = {*allowed}
    for path, data in files:
        for line, name in secrets_in(path, data):
            if name not in seen:
                seen.add(name)
                what = "is burnt" if name in BURNT else "looks like a secret"
                yield (
                    f"{path}:{line}: {what} (SHA-256 {name}); a sample: add it to KNOWN in "
                    f"{Path(__file__).name}"
                )


def ignored() -> list[str]:
    """Return what git tracks although .gitignore excludes it."""
    return _git("ls-files", "--cached", "--ignored", "--exclude-standard").decode().splitlines()


def main() -> int:
    lines = [*faults(history(), BURNT)] if "--history" in sys.argv[1:] else [*faults(tree())]
    lines += [f"{path}: in git, although .gitignore excludes it" for path in ignored()]
    print(*lines or ["no secret was found"], sep="\n")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
