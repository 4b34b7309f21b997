-- Recount usage from unfinished jobs, stored captures and what packages charge, in slices, because Redis serves no other client during a script.
-- Items already counted are in `ms:recount-seen`: a change of their usage updates both counts (`tally`). Other items are
-- counted as they are when their turn comes, and new ones from their creation. So the final count is that of its last moment.
-- It also adds queued jobs to the reaper's list and all jobs to the lists of their states: other versions may not have done so.
-- args: name (of this count), which ('live', 'captures', 'jobs' or a set of a package), family (of the records in a package's set), cursor
--       ('0' at first), many (how many to examine)
-- returns the next cursor, '0' when all were examined; '' if another count has replaced this one, or Redis has restarted
local name, which, cursor = of_this_start(args.name), args.which, args.cursor
if redis.call('HGET', RECOUNT, 'name') ~= name then
  if which ~= 'live' or cursor ~= '0' then
    return ''
  end
  redis.call('UNLINK', RECOUNT, SEEN)
  redis.call('HSET', RECOUNT, 'name', name)
end

local is = {}
local function add(tenant, what, by)
  local field = tenant .. '/' .. what
  is[field] = (is[field] or 0) + by
end

-- Only the required fields are read.
local look = {}
function look.live(id)
  local state, kind, tenant, expected, cells, model, step, queue, room =
    unpack(redis.call('HMGET', key('job', id), 'state', 'kind', 'tenant', 'cells_expected', 'cells', 'model', 'step', 'queue', 'room'))
  if not state or TERMINAL[state] or redis.call('SADD', SEEN, key('job', id)) == 0 then
    return
  end
  tenant = tenant or 'default'
  add(tenant, 'jobs', 1)
  add(tenant, 'room', tonumber(room) or 0)
  add('', 'room', tonumber(room) or 0)
  if GRIDS[kind] then
    add(tenant, 'cells', tonumber(expected) - tonumber(cells))
    add('', 'cells', tonumber(expected) - tonumber(cells))
  end
  if state == 'queued' then
    add('', 'queued', 1)
    step = step or (STEPS[kind] or STEPS.generate).normal
    local line = (queue or '') == '' and step or step .. '.' .. queue
    if not redis.call('ZSCORE', turn('wait', model, line, tenant), id)
      and redis.call('SISMEMBER', turn('sent', model, line), id) == 0 then
      redis.call('ZADD', 'ms:live', now, id)
    end
  end
end
function look.captures(id)
  local tenant, bytes = unpack(redis.call('HMGET', key('capture', id), 'charged', 'bytes'))
  if tenant and redis.call('SADD', SEEN, key('capture', id)) == 1 then
    add(tenant, 'bytes', tonumber(bytes))
  end
end
function look.jobs(id, created)
  local state, tenant = unpack(redis.call('HMGET', key('job', id), 'state', 'tenant'))
  if state then
    list_job(id, state, tenant or 'default', created)
  end
end
local function charged(id, created)
  local record = key(args.family, id)
  local tenant, bytes = unpack(redis.call('HMGET', record, 'tenant', 'bytes'))
  if tenant and redis.call('SADD', SEEN, record) == 1 then
    add(tenant, 'bytes', tonumber(bytes) or 0)
    redis.call('ZADD', key(which, tenant), created, id) -- versions without this list wrote some
  end
end

local after, members = unpack(redis.call('ZSCAN', 'ms:' .. which, cursor, 'COUNT', args.many))
local examine = look[which] or charged
for at = 1, #members, 2 do
  examine(members[at], members[at + 1])
end
for field, by in pairs(is) do
  redis.call('HINCRBY', RECOUNT, field, by)
end
redis.call('EXPIRE', RECOUNT, RECOUNT_TTL_S) -- an abandoned count is no longer kept up to date
redis.call('EXPIRE', SEEN, 2 * RECOUNT_TTL_S)
return after
