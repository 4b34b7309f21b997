-- The arguments of a script: ARGV[1] is a map in MessagePack (`script_arguments.py`). Scripts of webhooks get `at`, and those of the
-- ledger all of these:
--   at            the time in seconds since the epoch, as text, which is what records keep
--   result_ttl    seconds for which results are kept
--   event_limit   entries of a job's event stream
--   max_attempts  attempts at a job
--   on_desync     'retry' or 'fail': what becomes of a job about which ranks disagree
--   window        messages of a model and step that are under way at once
--   channels      kombu's prefix of this database's channels
-- What a script gets besides is in its own head. What is nil was left out.
-- Keys are built inside the scripts: Redis Cluster is not a target.
local args = cmsgpack.unpack(ARGV[1])
local now = tonumber(args.at)
