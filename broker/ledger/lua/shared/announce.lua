-- Webhooks: outbox entries of a state change, written in the same commit. Included above transitions.lua, whose `move`
-- calls `announce`, and above the outbox's own scripts (`hooks_….lua`); the only argument available here is `at`.
-- Here and not in the package that sends webhooks: whichever process commits writes them, whatever is installed there (docs/decisions/0011).
--   ms:hook:{id}            hash: a delivery, with all that its body needs; ms:hook-log:{id}: its latest attempts as JSON
--   ms:hooks                zset: ids of all pending deliveries, by due time
--   ms:hook-pending:{tenant} set: a tenant's pending ids, without those of its policies
--   ms:hook-lanes           zset: lanes (a tenant's receivers at one host), by the time of their next delivery
--   ms:hook-lane:{lane}     zset: its pending ids that no sender holds, by due time
--   ms:hook-busy:{lane}     zset: its ids that are being sent, by end of lease
--   ms:hook-room            hash: lane -> number of concurrent deliveries
--   ms:hook-dropped         hash: tenant -> decisions of its policies that got no webhook
--   ms:hook-index           zset: all ids by creation; ms:hook-index:{tenant}: a tenant's; ms:hook-job:{job}: set of a job's
--   ms:hook-done            zset: settled deliveries, by time

local HOOK_FIRST_ROOM = 4 -- of a lane without history
local HOOK_LANE_ROOM = 256 -- deliveries that may wait in a lane when a policy adds one; as in packages/webhooks/docs/webhooks.md

-- The tenant of a lane.
local function hook_owner(lane)
  return string.match(lane, '^([^|]*)')
end

local function hook_lane(tenant, url)
  return tenant .. '|' .. string.lower(string.match(url, '^%a+://([^/?#]*)') or '')
end

local function hook_room(lane)
  return tonumber(redis.call('HGET', 'ms:hook-room', lane) or HOOK_FIRST_ROOM)
end

-- When this lane next has something to send: when its first delivery is due, if there is room for it, or when a lease ends.
local function hook_plan(lane)
  local first = redis.call('ZRANGE', 'ms:hook-lane:' .. lane, 0, 0, 'WITHSCORES')
  local lease = redis.call('ZRANGE', 'ms:hook-busy:' .. lane, 0, 0, 'WITHSCORES')
  local at
  if first[1] and redis.call('ZCARD', 'ms:hook-busy:' .. lane) < hook_room(lane) then
    at = first[2]
  end
  if lease[1] and (not at or tonumber(lease[2]) < tonumber(at)) then
    at = lease[2]
  end
  if at then
    redis.call('ZADD', 'ms:hook-lanes', at, lane)
  else
    redis.call('ZREM', 'ms:hook-lanes', lane)
    redis.call('HDEL', 'ms:hook-room', lane)
  end
end

-- Mark a delivery pending, due at `at`.
local function hook_put(id, lane, at)
  redis.call('HSET', 'ms:hook:' .. id, 'state', 'pending', 'next', at)
  redis.call('ZADD', 'ms:hooks', at, id)
  -- Any tenant's traffic makes a policy's: it must not count against the tenant that registered the policy.
  if redis.call('HEXISTS', 'ms:hook:' .. id, 'policy') == 0 then
    redis.call('SADD', 'ms:hook-pending:' .. hook_owner(lane), id)
  end
  redis.call('ZADD', 'ms:hook-lane:' .. lane, at, id)
  hook_plan(lane)
end

-- Add the webhook of the state that `job` has just entered, or of the event `what`, if its callback lists it. No webhook is added
-- twice: an attempt begins once and a job ends once, and each has one id. `own`, of a policy's decision: detail (for the body), mark
-- (for the id), and, if the webhook is the policy's: its callback, hook. Such a webhook is dropped and counted while too many wait in its lane;
-- it is counted again if its job is tried again. The owner of a policy gets a hash for the id of another tenant's job.
local function announce(job, what, own)
  local callback = own and own.hook or job.callback and cjson.decode(job.callback)
  if not callback then
    return
  end
  local name = 'job.' .. (what or job.state)
  local listed = false
  for _, event in ipairs(callback.events) do
    listed = listed or event == name
  end
  if not listed then
    return
  end
  local tenant, detail, shown = job.tenant or 'default', own and own.detail or '', job.id
  if (callback.tenant or '') ~= '' and callback.tenant ~= tenant then
    local function other(id)
      return 'other_' .. redis.sha1hex(id)
    end
    tenant, shown = callback.tenant, other(job.id)
    detail = string.gsub(detail, '("inherited":")(job_%w+)', function(name, id)
      return name .. other(id)
    end)
  end
  local id = 'msg_' .. string.gsub(shown, '^job_', '') .. '_' .. (what or job.state)
  if not what and not TERMINAL[job.state] then
    id = id .. '_' .. job.attempt
  end
  if own then
    id = id .. '_' .. own.mark
  end
  if redis.call('EXISTS', 'ms:hook:' .. id) == 1 then
    return
  end
  local lane = hook_lane(tenant, callback.url)
  if own and own.hook then
    if redis.call('ZCARD', 'ms:hook-lane:' .. lane) >= HOOK_LANE_ROOM then
      redis.call('HINCRBY', 'ms:hook-dropped', tenant, 1)
      return
    end
    redis.call('HSET', 'ms:hook:' .. id, 'policy', 1)
  end
  redis.call('HSET', 'ms:hook:' .. id, 'created', args.at, 'job', job.id, 'shown', shown, 'event', name, 'tenant', tenant, 'key',
    callback.key or '', 'url', callback.url, 'job_state', job.state, 'attempt', job.attempt, 'model', job.model, 'tries', 0, 'detail',
    detail)
  redis.call('ZADD', 'ms:hook-index', args.at, id)
  redis.call('ZADD', 'ms:hook-index:' .. tenant, args.at, id)
  redis.call('SADD', 'ms:hook-job:' .. job.id, id)
  hook_put(id, lane, args.at)
end
