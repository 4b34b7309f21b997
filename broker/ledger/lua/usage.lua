-- What tenants may use and what they use, counted in the commit that changes it.

-- How much a tenant may use, as far as that was said of it by name.
local function limits_of(tenant)
  local packed = redis.call('HGET', 'ms:tenants', tenant)
  return packed and cmsgpack.unpack(packed).limits or {}
end

-- The limits that hold for a tenant: its own, and where it has none those in `args.limits`. Its own come second.
local function limits_for(tenant)
  local limits, own = args.limits, limits_of(tenant)
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
