-- Forget deliveries settled before a given time.
-- args: before (that time), limit (how many at most)
-- returns how many
local ids = redis.call('ZRANGEBYSCORE', 'ms:hook-done', '-inf', args.before, 'LIMIT', 0, args.limit)
for _, id in ipairs(ids) do
  local job, tenant = unpack(redis.call('HMGET', 'ms:hook:' .. id, 'job', 'tenant'))
  redis.call('DEL', 'ms:hook:' .. id, 'ms:hook-log:' .. id)
  if job then
    redis.call('ZREM', 'ms:hook-index', id)
    redis.call('ZREM', 'ms:hook-index:' .. tenant, id)
    redis.call('SREM', 'ms:hook-job:' .. job, id)
  end
  redis.call('ZREM', 'ms:hook-done', id)
end
return #ids
