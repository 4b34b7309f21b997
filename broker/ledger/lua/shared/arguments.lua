-- The arguments of a script: ARGV[1] is a map in MessagePack (`script_arguments.py`). Webhook scripts get `at`; ledger
-- scripts get all of these:
--   at            the time in seconds since the epoch, as text, as records store it
--   result_ttl    retention of results, in seconds
--   event_limit   maximum number of entries in a job's event stream
--   max_attempts  maximum number of attempts at a job
--   on_desync     'retry' or 'fail': how to handle a job whose ranks disagree
--   window        messages of one model and step in flight concurrently
--   store_wait    how long a job waits for the artifact store, in seconds
--   channels      kombu's prefix of this database's channels
-- Each script lists its other arguments in its header. An omitted argument is nil.
-- Keys are built inside the scripts: Redis Cluster is not a target.
local args = cmsgpack.unpack(ARGV[1])
local now = tonumber(args.at)
