"""Signs of life of processes without an HTTP port: keys in Redis that expire when their process has
stopped.
"""

#: JSON: url, pid, version, receipts received; since when a relay has been alive without a break, in
#: seconds since the epoch. Relays share it, and each begins the time again when it starts.
RELAY_KEY = "ms:relay"
#: A relay renews it every `RELAY_BEAT_S` seconds; without that it stays `RELAY_ALIVE_S` seconds.
RELAY_BEAT_S, RELAY_ALIVE_S = 5.0, 15
#: When the reaper last finished a pass, in seconds since the epoch.
REAPER_KEY = "ms:sweeper"
