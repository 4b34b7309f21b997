-- What became of an attempt.
-- args: now, id, token of the lease, 'delivered' | 'pending' (again later) | 'failed' | 'disabled' | 'refused', the attempt (JSON),
--       when it is due again, attempts kept, '1' when it was answered quickly and well, most at once
-- returns 'unknown' | 'stale' (somebody else has it, or it is settled: noted all the same) | the state after it
local id, token, verdict, attempt, due, kept, well, most = unpack(ARGV, 2)
local hook = 'ms:hook:' .. id
local state, lease, tenant, url = unpack(redis.call('HMGET', hook, 'state', 'lease', 'tenant', 'url'))
if not state then
  return 'unknown'
end
redis.call('RPUSH', 'ms:hook-log:' .. id, attempt)
redis.call('LTRIM', 'ms:hook-log:' .. id, -tonumber(kept), -1)
if state ~= 'pending' or (lease ~= token and verdict ~= 'delivered') then
  return 'stale'
end
local lane = hook_lane(tenant, url)
if well == '1' then
  redis.call('HSET', 'ms:hook-room', lane, math.min(2 * hook_room(lane), tonumber(most)))
else
  redis.call('HSET', 'ms:hook-room', lane, 1) -- one that does not answer, or slowly, is asked one thing at a time
end
if verdict == 'pending' then
  redis.call('HINCRBY', hook, 'tries', 1)
  redis.call('HDEL', hook, 'lease')
  redis.call('ZREM', 'ms:hook-busy:' .. lane, id)
  hook_put(id, lane, due)
  return verdict
end
if verdict == 'disabled' then
  redis.call('HSETNX', 'ms:hook-off', tenant .. '|' .. url, ARGV[1])
end
hook_end(id, lane, verdict)
hook_plan(lane)
return verdict
