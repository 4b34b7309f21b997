-- Limits and usage of tenants; usage is counted in the commit that changes it.
-- (Counting at each submission would be exact too, but slow with many captures.)

-- Limits set for a tenant by name.
local function limits_of(tenant)
  local packed = redis.call('HGET', 'ms:tenants', tenant)
  return packed and cmsgpack.unpack(packed).limits or {}
end

-- The limits that apply to a tenant: its own, or else those in `args.limits`. Its own are the second result.
local function limits_for(tenant)
  local limits, own = args.limits, limits_of(tenant)
  for name, number in pairs(own) do
    limits[name] = number
  end
  return limits, own
end

local MIB = 1048576

-- The refusal if `used` plus `more` exceeds a limit, which is counted in multiples of `unit`; otherwise nil.
local function over(limits, name, used, more, unit)
  if more > 0 and limits[name] > 0 and used + more > limits[name] * unit then
    return {'refused', name, math.max(0, math.ceil(used / unit)), limits[name], ''}
  end
end

-- The refusal while the service takes nothing new (`core/closing.py`); otherwise nil. What a gradient worker compares belongs to jobs that
-- were accepted before.
local function closed(tenant)
  if tenant ~= COMPARISONS and redis.call('HEXISTS', 'ms:service', 'closed') == 1 then
    return {'refused', 'closed', 0, 0, ''}
  end
end

-- During a recount (recount.lua): the count so far, and the keys of the jobs and captures already counted.
local RECOUNT, SEEN, RECOUNT_TTL_S = 'ms:recount', 'ms:recount-seen', 600

-- A count is valid for one run of Redis: after a restart cursors change, and the last second of writes may be missing.
local function of_this_start(name)
  return name .. ' ' .. string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
end

local counting = nil -- queried once per script
local function recounting()
  if counting == nil then
    counting = redis.call('EXISTS', RECOUNT) == 1
  end
  return counting
end

-- A new job or capture uses nothing yet: it is counted from here on.
local function tally_from_here(of)
  if recounting() then
    redis.call('SADD', SEEN, of)
  end
end

-- Change a tenant's usage of `jobs`, `cells` or `bytes`; the total over all tenants has no tenant's name. `of`: the key of the job,
-- capture or other record that causes the change.
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

-- Keep the memory that the job may still take (`core/job_room.py`), or give it free. Attempts share it: another one stores anew what the
-- last one stored.
local function tally_room(job, sign)
  local room = sign * (job.room or 0)
  tally(key('job', job.id), job.tenant, 'room', room)
  tally(key('job', job.id), '', 'room', room)
end

-- Change the bytes of a job's capture files, if its user requested files (operators' captures are not charged to users).
local function charge(id, by)
  local tenant = redis.call('HGET', key('capture', id), 'charged')
  if tenant then
    tally(key('capture', id), tenant, 'bytes', by)
  end
end
