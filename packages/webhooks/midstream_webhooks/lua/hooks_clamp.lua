-- After the clock was set back: limit each delivery's wait to its pause from now, and each lease to the length of a new one.
-- args: ids, lease (seconds)
-- returns how many were due later
local moved = 0
for _, id in ipairs(args.ids) do
  local tenant, url, pause, lease = unpack(redis.call('HMGET', 'ms:hook:' .. id, 'tenant', 'url', 'pause', 'lease'))
  local due, latest = redis.call('ZSCORE', 'ms:hooks', id), now + (tonumber(pause) or 0)
  if due and url then
    local lane = hook_lane(tenant, url)
    local ends = lease and redis.call('ZSCORE', 'ms:hook-busy:' .. lane, id)
    if ends and tonumber(ends) > now + args.lease then
      redis.call('ZADD', 'ms:hook-busy:' .. lane, now + args.lease, id)
    end
    if tonumber(due) > latest then
      moved = moved + 1
      redis.call('HSET', 'ms:hook:' .. id, 'next', string.format('%.6f', latest))
      redis.call('ZADD', 'ms:hooks', latest, id)
      redis.call('ZADD', 'ms:hook-lane:' .. lane, 'XX', latest, id)
    end
    hook_plan(lane)
  end
end
return moved
