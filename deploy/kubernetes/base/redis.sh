#!/bin/sh
# Redis configured for Midstream: every change on disk within a second, no eviction, a password.
# The password is passed in a file, because every user can read command lines. `check` tests whether it accepts writes.
set -eu
password=$(sed 's,.*:\([^@]*\)@.*,\1,' /run/secrets/redis_url)

if [ "${1:-}" = check ]; then
    [ "$(REDISCLI_AUTH=$password redis-cli set ms:health 1 EX 60)" = OK ]
    exit
fi

# Cuts off what a power failure left of a command or a transaction at the end of the log, and keeps it beside the log.
# Redis itself (aof-load-truncated yes) leaves the beginning of a transaction, which comes into force at the second start.
# Any other damage stays as it is: Redis refuses it.
mend() {
    if found=$(redis-check-aof "$1" 2>&1); then return; fi
    good=$(printf '%s\n' "$found" | sed -n 's/.*ok_up_to=\([0-9]*\).*/\1/p')
    at=$(printf '%s\n' "$found" | sed -n 's/^ *0x *\([0-9a-f]*\): .*/0x\1/p')
    at=$((${at:-$good}))
    header=$(printf '^[*][0-9]*\r$')
    rest=$(tail -c "+$((at + 1))" "$1" | tr -d '\000' | wc -c)
    if tail -c "+$((at + 3))" "$1" | grep -aq "$header"; then return; fi # commands follow
    case $found in *"format error"*) if [ "$rest" -gt 0 ]; then return; fi ;; esac
    tail -c "+$((good + 1))" "$1" >"$1.cut-at-$good.$(date +%Y%m%dT%H%M%S)"
    truncate -s "$good" "$1"
    echo "$1 had a damaged end, as after a power failure: what followed byte $good was cut off and saved beside it"
}

umask 077
printf 'requirepass %s\n' "$password" >/tmp/redis.conf
written=$(cat /data/*/*.manifest 2>/dev/null | sed -n 's/^file \([^ ]*\) seq [0-9]* type i.*/\1/p' | tail -n 1)
for log in /data/*/"${written:-none}"; do
    if [ -f "$log" ]; then mend "$log"; fi
done
exec redis-server /tmp/redis.conf \
    --bind 0.0.0.0 --port 6379 --dir /data --daemonize no --protected-mode yes \
    --appendonly yes --appendfsync "${REDIS_APPENDFSYNC:-everysec}" --aof-load-truncated no --save '' \
    --maxmemory "${REDIS_MAXMEMORY:-0}" --maxmemory-policy noeviction --stream-node-max-bytes 1024 --hash-max-ziplist-entries 64
