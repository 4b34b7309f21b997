#!/bin/sh
# Prints the manifests of an overlay; the secrets that it lacks are made first: `deploy/kubernetes/render.sh gpu | kubectl apply -f -`.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
overlay=${1:?the name of an overlay: cpu, gpu, keda or bucket}
"$here/secrets.sh" "$overlay" >&2
key="$here/bucket/secrets/artifact_secret_key"
if [ "$overlay" = bucket ] && [ ! -s "$key" ]; then
    echo "error: the overlay bucket needs the secret key of its bucket first: printf %s \"\$SECRET_KEY\" > $key" >&2
    exit 1
fi
exec kubectl kustomize "$here/$overlay"
