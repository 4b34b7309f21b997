-- Whose message is sent next: a message of a queued job is sent while fewer than `window` of its model and step are under way (sent
-- and not claimed); the other jobs wait here, per tenant, and the tenant with the least virtual time is next (stride scheduling).
-- And what do tenants use? Counted in the commit that changes it.

local function turn(what, model, step, tenant)
  return 'ms:' .. what .. ':' .. model .. ':' .. step .. (tenant and ':' .. tenant or '')
end

-- How much a tenant may use, as far as that was said of it by name.
local function limits_of(tenant)
  local packed = redis.call('HGET', 'ms:tenants', tenant)
  return packed and cmsgpack.unpack(packed).limits or {}
end

-- The limits that hold for a tenant: its own, and where it has none those in `defaults` (JSON). Its own come second.
local function limits_for(tenant, defaults)
  local limits, own = cjson.decode(defaults), limits_of(tenant)
  for name, number in pairs(own) do
    limits[name] = number
  end
  return limits, own
end

local MIB = 1048576

-- The refusal where `used` and `more` come to more than a limit, of which one is `unit` of theirs; nil where they do not.
local function over(limits, name, used, more, unit)
  if more > 0 and limits[name] > 0 and used + more > limits[name] * unit then
    return {'refused', name, math.max(0, math.ceil(used / unit)), limits[name], ''}
  end
end

-- While usage is counted anew (recount.lua): what was counted by now, and the keys of the jobs and captures that are counted.
local RECOUNT, SEEN, RECOUNT_TTL_S = 'ms:recount', 'ms:recount-seen', 600

-- A count belongs to one start of Redis: the next one's cursors mean something else, and its last second may be missing.
local function of_this_start(name)
  return name .. ' ' .. string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
end

local counting = nil -- asked once in a script
local function recounting()
  if counting == nil then
    counting = redis.call('EXISTS', RECOUNT) == 1
  end
  return counting
end

-- A job or capture that is new uses nothing yet: it is counted from here on.
local function tally_from_here(of)
  if recounting() then
    redis.call('SADD', SEEN, of)
  end
end

-- What a tenant uses of something (`jobs`, `cells`, `bytes`); what all together use has no tenant's name. `of`: the key of the job or
-- capture that uses it.
local function tally(of, tenant, what, by)
  if by ~= 0 then
    redis.call('HINCRBY', 'ms:usage', tenant .. '/' .. what, by)
    if recounting() and redis.call('SISMEMBER', SEEN, of) == 1 then
      redis.call('HINCRBY', RECOUNT, tenant .. '/' .. what, by)
    end
  end
end

local function tally_cells(job, by)
  tally(key('job', job.id), job.tenant, 'cells', by)
  tally(key('job', job.id), '', 'cells', by)
end

-- More or fewer bytes of a job's capture files, where its user asked for files (what the operator captures costs no user anything).
local function charge(id, by)
  local tenant = redis.call('HGET', key('capture', id), 'charged')
  if tenant then
    tally(key('capture', id), tenant, 'bytes', by)
  end
end

-- Too late to begin it: what was begun once has no deadline any more.
local function overdue(job)
  return job.attempt == 0 and job.expires and job.expires <= now
end

-- When a queued job is to be looked at: at `at`, or when it expires.
local function look_at_queued(job, at)
  look_at(job, job.attempt == 0 and job.expires and math.min(job.expires, at) or at)
end

local function send(job)
  redis.call('SADD', turn('sent', job.model, job.step), job.id)
  look_at_queued(job, now + QUEUED_LOOK_S)
  post(job)
end

-- The tenant whose turn it is, and its virtual time; nil when nobody waits. Tenants that wait for nothing are forgotten once their
-- time is past: they would begin again at the time of those who do.
local function front(model, step)
  while true do
    local tenant, at = unpack(redis.call('ZRANGE', turn('fair', model, step), 0, 0, 'WITHSCORES'))
    if not tenant or redis.call('EXISTS', turn('wait', model, step, tenant)) == 1 then
      return tenant, tonumber(at)
    end
    redis.call('ZREM', turn('fair', model, step), tenant)
  end
end

-- Send what waits while there is room.
local function fill(model, step)
  local under_way = redis.call('SCARD', turn('sent', model, step))
  while under_way < window do
    local tenant, at = front(model, step)
    if not tenant then
      return
    end
    local job = read(redis.call('ZPOPMIN', turn('wait', model, step, tenant))[1])
    if job and job.state == 'queued' then
      redis.call('ZADD', turn('fair', model, step), at + (job.cost or 1) / (limits_of(tenant).weight or 1), tenant)
      send(job)
      under_way = under_way + 1
    end
  end
end

-- A job was accepted: its message is sent now if there is room and nobody waits, else when its turn comes.
local function enter(job)
  tally_from_here(key('job', job.id))
  tally(key('job', job.id), job.tenant, 'jobs', 1)
  tally(key('job', job.id), '', 'queued', 1)
  redis.call('SADD', 'ms:queues', job.model .. ':' .. job.step)
  local first, least = front(job.model, job.step)
  if not first and redis.call('SCARD', turn('sent', job.model, job.step)) < window then
    send(job)
    return
  end
  redis.call('ZADD', turn('fair', job.model, job.step), 'NX', least or 0, job.tenant)
  redis.call('ZADD', turn('wait', job.model, job.step, job.tenant), now, job.id)
  look_at_queued(job, math.huge)
  fill(job.model, job.step)
end

-- A job that had begun is queued again: it does not wait another time.
local function enter_again(job)
  tally(key('job', job.id), '', 'queued', 1)
  redis.call('SADD', 'ms:queues', job.model .. ':' .. job.step)
  send(job)
end

-- A job is queued no more: the next may come.
local function leave(job)
  tally(key('job', job.id), '', 'queued', -1)
  if redis.call('SREM', turn('sent', job.model, job.step), job.id) == 0 then
    redis.call('ZREM', turn('wait', job.model, job.step, job.tenant), job.id)
  end
  fill(job.model, job.step)
end
