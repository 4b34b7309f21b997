-- Delete a job's captures: they are hidden from here on, and reported as deleted for a while; the files are removed later.
-- args: id, spare (true: keep captures that running jobs are patched with)
-- returns 'unknown' | 'running' (the job is not over) | 'gone' (they were deleted before) | 'leased' | 'forgotten'
local id = args.id
local capture = key('capture', id)
if redis.call('EXISTS', capture) == 0 then
  redis.call('ZREM', 'ms:captured', id)
  return 'unknown'
end
if redis.call('HEXISTS', capture, 'deleted') == 1 then
  return 'gone'
end
local job = read(id)
if job and not TERMINAL[job.state] then
  return 'running'
end
-- A lease protects captures from expiry, not from their owner. A job that has loaded the rows,
-- which are correct, then finishes; one that has yet to load them fails.
if args.spare and redis.call('ZCOUNT', key('run-lease', id), now, '+inf') > 0 then
  return 'leased'
end
redis.call('HSET', capture, 'deleted', args.at)
if not args.spare then -- their owner deletes them
  drop_texts(id)
end
charge(id, -(tonumber(redis.call('HGET', capture, 'bytes')) or 0))
redis.call('EXPIRE', capture, 2 * args.result_ttl) -- as long as clients may still request it
redis.call('ZREM', 'ms:captures', id)
redis.call('ZREM', key('captures', redis.call('HGET', capture, 'tenant') or 'default'), id)
redis.call('ZREM', 'ms:captured', id)
redis.call('ZADD', 'ms:deleting', now, id) -- until nothing is left on disk and no more files can arrive
return 'forgotten'
