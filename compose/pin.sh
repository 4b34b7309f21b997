#!/usr/bin/env bash
# Pins the images that others publish: NAME:TAG becomes NAME:TAG@sha256:…, the digest that the tag has now, in all files that name it.
# usage: compose/pin.sh      (`make pin-images`; needs docker with buildx, and the registries)
set -euo pipefail
cd "$(dirname "$0")/.."
files=(Dockerfile compose.yaml deploy/kubernetes/base/redis.yaml)
mapfile -t images < <(grep -hoE '(_IMAGE:-|_IMAGE=|image: )[a-z0-9./-]+:[A-Za-z0-9][A-Za-z0-9._-]*' "${files[@]}" |
    sed -E 's/^(_IMAGE:-|_IMAGE=|image: )//' | sort -u)
for image in "${images[@]}"; do
    digest=$(docker buildx imagetools inspect "$image" --format '{{.Manifest.Digest}}')
    [[ $digest =~ ^sha256:[0-9a-f]{64}$ ]] || { echo "error: $image: the registry answers '$digest' in place of a digest" >&2; exit 1; }
    sed -E -i "s#(${image//./\\.})(@sha256:[0-9a-f]{64})?([^A-Za-z0-9._@-]|\$)#\\1@$digest\\3#" "${files[@]}"
    echo "$image@$digest"
done
