#!/bin/sh
# Creates secrets/ in an overlay: `deploy/kubernetes/secrets.sh gpu`. Existing files are kept.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
exec "$here/../../compose/secrets.sh" "$here/${1:?the name of an overlay: cpu, gpu, keda or bucket}/secrets"
