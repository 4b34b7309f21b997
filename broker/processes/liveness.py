"""Heartbeats of processes without an HTTP port: keys in Redis that expire when their process has
stopped.
"""

#: JSON: url, pid, version, receipts received; since when a relay has been alive without a break, in
#: seconds since the epoch. Relays share the key, and each resets that time when it starts.
RELAY_KEY = "ms:relay"
#: A relay renews its key every `RELAY_BEAT_S` seconds; the key expires after `RELAY_ALIVE_S`.
RELAY_BEAT_S = 5.0
RELAY_ALIVE_S = 15
#: A relay whose last renewal is older than this is late: it may have ended since, so the time in
#: which receipts have to arrive does not count.
RELAY_LATE_S = 1.5 * RELAY_BEAT_S
#: When the reaper last finished a pass, in seconds since the epoch.
REAPER_KEY = "ms:sweeper"
