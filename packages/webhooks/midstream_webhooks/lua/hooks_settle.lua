-- Record the outcome of a delivery attempt.
-- args: id, token (of the lease), verdict ('delivered' | 'pending' (again later) | 'failed' | 'refused'), attempt (JSON),
--       due (when it is due again), pause (seconds until then), kept (attempts kept),
--       well (whether the response was quick and successful), most (concurrent deliveries of a lane)
-- returns 'unknown' | 'stale' (another sender has it, or it is settled: the attempt is still logged) | the new state
local id, verdict = args.id, args.verdict
local hook = 'ms:hook:' .. id
local state, lease, tenant, url = unpack(redis.call('HMGET', hook, 'state', 'lease', 'tenant', 'url'))
if not state then
  return 'unknown'
end
redis.call('RPUSH', 'ms:hook-log:' .. id, args.attempt)
redis.call('LTRIM', 'ms:hook-log:' .. id, 0 - args.kept, -1)
if state ~= 'pending' or (lease ~= args.token and verdict ~= 'delivered') then
  return 'stale'
end
local lane = hook_lane(tenant, url)
if args.well then
  redis.call('HSET', 'ms:hook-room', lane, math.min(2 * hook_room(lane), args.most))
else
  redis.call('HSET', 'ms:hook-room', lane, 1) -- an unresponsive or slow receiver gets one delivery at a time
end
if verdict == 'pending' then
  redis.call('HINCRBY', hook, 'tries', 1)
  redis.call('HDEL', hook, 'lease')
  redis.call('ZREM', 'ms:hook-busy:' .. lane, id)
  redis.call('HSET', hook, 'pause', args.pause)
  hook_put(id, lane, args.due)
  return verdict
end
redis.call('HSET', hook, 'state', verdict)
redis.call('HDEL', hook, 'next', 'pause', 'lease')
redis.call('ZREM', 'ms:hooks', id)
redis.call('SREM', 'ms:hook-pending:' .. tenant, id)
redis.call('ZREM', 'ms:hook-lane:' .. lane, id)
redis.call('ZREM', 'ms:hook-busy:' .. lane, id)
redis.call('ZADD', 'ms:hook-done', args.at, id)
hook_plan(lane)
return verdict
