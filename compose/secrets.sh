#!/usr/bin/env bash
# Creates the secrets of compose.yaml and its .env (from .env.example), each once: existing files are kept, unless others may know them. usage: compose/secrets.sh [FOLDER]
# For new ones, delete the folder and run this again. The folder is closed to other users; the files in it are not, because in the containers users other than their owner read them.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:-$root/compose/secrets}
refuse() { # REASON
    echo "error: $folder $1. Its secrets are to be replaced: delete the folder, run this again, and restart what used them" >&2
    exit 1
}
if [ -d "$folder" ] && [ -n "$(ls -A "$folder")" ]; then
    tracked=$(git -c safe.directory='*' -C "$folder" ls-files . 2>/dev/null || true)
    if [ -n "$tracked" ]; then refuse "is in git: remove it there as well, with git rm -r --cached"; fi
    if [ -n "$(find "$folder" -maxdepth 0 -perm /001)" ]; then refuse "was open to every account of this machine (valid: mode 700)"; fi
fi
mkdir -p "$folder"
chmod 700 "$folder"

random() { # CHARACTERS COUNT
    local text=
    while [ ${#text} -lt "$2" ]; do text+=$(head -c 512 /dev/urandom | LC_ALL=C tr -dc "$1"); done
    printf '%s' "${text:0:$2}"
}
secret() { # NAME VALUE
    if [ -e "$folder/$1" ]; then return; fi
    printf '%s' "$2" >"$folder/$1"
    chmod 444 "$folder/$1"
    echo "made $folder/$1"
}

secret redis_url "redis://:$(random 'A-Za-z0-9' 40)@redis:6379/0"
secret admin_key "ms_$(random 'a-z0-9' 12)_$(random 'A-Za-z0-9' 43)"
secret observe_key "ms_$(random 'a-z0-9' 12)_$(random 'A-Za-z0-9' 43)" # for Prometheus
secret flower_auth "flower:$(random 'A-Za-z0-9' 24)"
secret grafana_password "$(random 'A-Za-z0-9' 24)"
if [ $# = 0 ] && [ ! -e "$root/.env" ]; then
    cp "$root/.env.example" "$root/.env"
    echo "made $root/.env"
fi
