#!/bin/sh
# Redis configured for Midstream: every change on disk within a second, no eviction, a password.
# The password is passed in a file, because every user can read command lines. `check` tests whether it accepts writes.
set -eu
password=$(sed 's,.*:\([^@]*\)@.*,\1,' /run/secrets/redis_url)

if [ "${1:-}" = check ]; then
    [ "$(REDISCLI_AUTH=$password redis-cli set ms:health 1 EX 60)" = OK ]
    exit
fi

umask 077
printf 'requirepass %s\n' "$password" >/tmp/redis.conf
exec redis-server /tmp/redis.conf \
    --bind 0.0.0.0 --port 6379 --dir /data --daemonize no --protected-mode yes \
    --appendonly yes --appendfsync "${REDIS_APPENDFSYNC:-everysec}" --save '' \
    --maxmemory "${REDIS_MAXMEMORY:-0}" --maxmemory-policy noeviction --stream-node-max-bytes 1024 --hash-max-ziplist-entries 64
