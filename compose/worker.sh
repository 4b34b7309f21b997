#!/bin/sh
# Starts the worker of a container: with the demo model if no model is set, and under a free name that a replacement container
# takes again, so that it finds the receipts its predecessor had not sent.
set -eu

# Read by `python -m midstream.broker.health worker`: empty while the worker starts, otherwise the reason why it cannot. That check removes the
# file once the worker is ready. Until then every failure is retried here: a restarted container would be "health: starting" each time.
starting=${TMPDIR:-/tmp}/midstream-worker-starting
: >"$starting"
export WORKER_STARTING_NOTE="$starting"

engine=${MIDSTREAM_ENGINE:-vllm}
if [ -z "${MIDSTREAM_MODEL:-}" ] && { [ "$engine" = vllm ] || [ "$engine" = gradients ]; }; then
    until MIDSTREAM_MODEL=$(python -m midstream_ops.demo_model); do
        echo "the demo model could not be fetched: see the log of this container" >"$starting"
        sleep "${START_RETRY_S:-30}"
    done
    : >"$starting"
    export MIDSTREAM_MODEL
fi
if [ -d "${MIDSTREAM_MODEL:-}" ]; then
    export HF_HUB_OFFLINE=1 # all files are local: an unresponsive hub must not delay the start
fi

if [ -z "${MIDSTREAM_WORKER_ID:-}" ]; then
    name=${MIDSTREAM_MODEL_NAME:-${MIDSTREAM_MODEL:-$engine}}
    name=$(basename "$name" | tr -c 'A-Za-z0-9_.\n-' '-')
    if [ "$engine" = gradients ]; then name=$name-gradients; fi
    mkdir -p "$MIDSTREAM_DATA_DIR/workers"
    place=0
    while :; do
        place=$((place + 1))
        exec 9>"$MIDSTREAM_DATA_DIR/workers/$name-$place.place"
        if flock --nonblock 9; then break; fi # held until the last process of this container has ended
    done
    export MIDSTREAM_WORKER_ID="$name-$place"
fi

# Not `exec`: this shell restarts the worker, so it must forward the signals that stop a container.
stopping='' child='' code=0
trap 'stopping=yes; kill -TERM $child 2>/dev/null || true' TERM INT

run() { # COMMAND…: sets `code` to its exit code; a signal interrupts only the wait
    "$@" &
    child=$!
    if [ -n "$stopping" ]; then kill -TERM "$child"; fi
    while :; do
        code=0
        wait "$child" || code=$?
        if ! kill -0 "$child" 2>/dev/null; then return; fi
    done
}

while :; do
    run python -m midstream.workers
    if [ -n "$stopping" ] || [ ! -e "$starting" ]; then exit "$code"; fi
    [ -s "$starting" ] || echo "the worker ended with exit code $code before it was ready: see the log of this container" >"$starting"
    run sleep "${START_RETRY_S:-30}"
    if [ -n "$stopping" ]; then exit; fi
done
