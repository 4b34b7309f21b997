-- Lease due deliveries to a sender: oldest lanes first, and per lane no more concurrently than it has room for.
-- args: ends (of the lease), token (of it), limit (how many at most), share (how many of one tenant at most), scan (lanes examined at
--       most), under_way: tenant -> how many of its deliveries this sender already holds
-- returns per delivery {id, job, event, tenant, key, url, created, job_state, attempt, model, tries, detail, shown}
local limit, share, has = args.limit, args.share, args.under_way
local LANES_AT_ONCE = 1000
local leased = {}
-- Lanes of tenants that have used up their share are skipped, so that they do not block others.
local lanes, scanned, taken = {}, 0, {}
repeat
  local due = redis.call('ZRANGEBYSCORE', 'ms:hook-lanes', '-inf', now, 'LIMIT', scanned, LANES_AT_ONCE)
  for _, lane in ipairs(due) do
    local tenant = hook_owner(lane)
    taken[tenant] = taken[tenant] or has[tenant] or 0
    if taken[tenant] < share then
      taken[tenant] = taken[tenant] + 1
      lanes[#lanes + 1] = lane
    end
  end
  scanned = scanned + #due
until #due < LANES_AT_ONCE or #lanes >= LANES_AT_ONCE or scanned >= args.scan
for _, lane in ipairs(lanes) do
  local tenant = hook_owner(lane)
  local waiting, busy = 'ms:hook-lane:' .. lane, 'ms:hook-busy:' .. lane
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', busy, '-inf', now)) do -- its sender is gone
    redis.call('ZREM', busy, id)
    redis.call('ZADD', waiting, redis.call('ZSCORE', 'ms:hooks', id) or now, id)
  end
  local room = math.min(hook_room(lane) - redis.call('ZCARD', busy), limit - #leased, share - (has[tenant] or 0))
  if room > 0 then
    for _, id in ipairs(redis.call('ZRANGEBYSCORE', waiting, '-inf', now, 'LIMIT', 0, room)) do
      local values = redis.call('HMGET', 'ms:hook:' .. id, 'job', 'event', 'tenant', 'key', 'url', 'created', 'job_state', 'attempt',
        'model', 'tries', 'detail', 'shown')
      redis.call('ZREM', waiting, id)
      redis.call('ZADD', busy, args.ends, id)
      redis.call('HSET', 'ms:hook:' .. id, 'lease', args.token)
      table.insert(values, 1, id)
      leased[#leased + 1] = values
      has[tenant] = (has[tenant] or 0) + 1
    end
  end
  hook_plan(lane)
  if #leased >= limit then
    break
  end
end
return leased
