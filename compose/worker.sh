#!/bin/sh
# Starts the worker of a container: with the demo model where no model is set, and under a name that is free and that a container
# put in its place takes again, so that it finds what its predecessor had not sent.
set -eu

# Read by `python -m midstream.broker.health worker`: empty while the worker starts, else why it cannot.
starting=${TMPDIR:-/tmp}/midstream-worker-starting
: >"$starting"

if [ -z "${MIDSTREAM_MODEL:-}" ] && [ "${MIDSTREAM_ENGINE:-vllm}" = vllm ]; then
    # Tried again here, not by starting the container again, which would be "health: starting" each time.
    until MIDSTREAM_MODEL=$(python -m midstream.client.models); do
        echo "the demo model cannot be had: the log of this container says why" >"$starting"
        sleep "${MODEL_RETRY_S:-30}"
    done
    : >"$starting"
    export MIDSTREAM_MODEL
fi
if [ -d "${MIDSTREAM_MODEL:-}" ]; then
    export HF_HUB_OFFLINE=1 # everything is there: a hub that does not answer must not hold up the start
fi

if [ -z "${MIDSTREAM_WORKER_ID:-}" ]; then
    name=${MIDSTREAM_MODEL_NAME:-${MIDSTREAM_MODEL:-fake}}
    name=$(basename "$name" | tr -c 'A-Za-z0-9_.\n-' '-')
    mkdir -p "$MIDSTREAM_DATA_DIR/workers"
    place=0
    while :; do
        place=$((place + 1))
        exec 9>"$MIDSTREAM_DATA_DIR/workers/$name-$place.place"
        if flock --nonblock 9; then break; fi # held until the last process of this container has ended
    done
    export MIDSTREAM_WORKER_ID="$name-$place"
fi

exec python -m midstream.workers
