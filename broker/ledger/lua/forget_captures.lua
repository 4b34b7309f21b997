-- A job's captures are deleted: from here on nobody is shown them; the files follow.
-- args: id, spare (true: not what jobs are patched with just now)
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
if args.spare and redis.call('ZCOUNT', key('run-lease', id), now, '+inf') > 0 then
  return 'leased'
end
redis.call('HSET', capture, 'deleted', args.at)
charge(id, -(tonumber(redis.call('HGET', capture, 'bytes')) or 0))
redis.call('EXPIRE', capture, 2 * args.result_ttl) -- as long as somebody may still ask
redis.call('ZREM', 'ms:captures', id)
redis.call('ZREM', key('captures', redis.call('HGET', capture, 'tenant') or 'default'), id)
redis.call('ZREM', 'ms:captured', id)
redis.call('ZADD', 'ms:deleting', now, id) -- until nothing is left on disk and nothing more can come
return 'forgotten'
