#!/usr/bin/env bash
# Installs packages with uv, which takes a fifth of pip's time, from the indexes and folders that pip is configured with.
# usage: requirements/locked.sh VENV ARGUMENTS OF `uv pip install`…      (from the repository root)
#
# uv itself comes into the venv by pip, at the version and with the hashes of uv.lock. As pip does, and uv by default does not, each
# package may come from any of the indexes: the hashes in the lock files say which builds are right.
set -euo pipefail
venv=$1; shift
pip=("$venv/bin/python" -m pip --disable-pip-version-check --no-input)
"$venv/bin/uv" --version 2>/dev/null | grep -q "$(sed -nE 's/^uv==([0-9.]+).*/\1/p' requirements/uv.lock)" ||
    "${pip[@]}" install --quiet --no-deps --require-hashes -r requirements/uv.lock
# `global.extra-index-url='a b'`, `:env:.find-links='c'`, …
mapfile -t sources < <("${pip[@]}" config list 2>/dev/null | "$venv/bin/python" -c '
import ast, sys
OPTIONS = {"index-url": "--default-index", "extra-index-url": "--extra-index-url", "find-links": "--find-links",
           "trusted-host": "--allow-insecure-host"}
for line in sys.stdin:
    key, _, value = line.rstrip("\n").partition("=")
    section, _, name = key.rpartition(".")
    if section in ("global", "install", ":env:") and name in OPTIONS:
        for part in ast.literal_eval(value).split():
            print(OPTIONS[name], part, sep="\n")
    elif name == "no-index" and ast.literal_eval(value) not in ("0", "false"):
        print("no-index", "", sep="\n")
    elif name == "cert":
        print("cert", ast.literal_eval(value), sep="\n")
')
options=()
for ((at = 0; at < ${#sources[@]}; at += 2)); do
    case ${sources[at]} in
    cert) export SSL_CERT_FILE=${sources[at + 1]} ;;
    no-index) options+=(--no-index) ;;
    *) options+=("${sources[@]:at:2}") ;;
    esac
done
export UV_HTTP_TIMEOUT=120 UV_NO_CONFIG=1
exec "$venv/bin/uv" pip install --python "$venv/bin/python" --index-strategy unsafe-best-match "${options[@]}" "$@"
