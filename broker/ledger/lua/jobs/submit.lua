-- Accept a job, or refuse it by its tenant's limits (jobs, tokens per minute): record, blobs, listing and idempotency key in one commit.
-- args: id, spec (packed), record (field of `ms:job:{id}` -> value, as `core/record.py` encodes them), idem (idempotency key, or nil),
--       body (its body's sha256), blob_ttl, tags (JSON list of the tags under which captures become files, or nil), packed_run (of the
--       source run that it makes, or nil), files (whether its user has files written), charged (whether their
--       bytes count as they arrive), limits (defaults where the tenant has none of
--       its own), side (of a side job: record, kept, open, limit, see `schemas/jobs/works.py`; or nil), blobs: {sha256, bytes, or false to
--       take the pinned tensor} of each
-- ARGV[2]: the bytes that Redis uses once this job and all others have ended; ARGV[3]: its `maxmemory`, 0 without a limit. Both are sampled.
-- returns {'created', id} | {'repeated', id of the first} | {'mismatch', id of the first} | {'exists', id} | {'missing', sha256}
--         | {'refused', name of the limit, used, allowed, seconds until it would be accepted ('' if unknown)}
local id, spec, record, tags, idem = args.id, args.spec, args.record, args.tags, args.idem
local model, tenant, created = record.model, record.tenant, record.created
local side = args.side

-- How many side jobs there are: those whose results are kept, and those that have not ended.
local function count_side()
  for _, other in ipairs(redis.call('SMEMBERS', side.open)) do
    local state = redis.call('HGET', key('job', other), 'state')
    if not state or TERMINAL[state] then
      redis.call('SREM', side.open, other)
    end
  end
  return redis.call('HLEN', side.kept) + redis.call('SCARD', side.open)
end

-- The first limit that a submission exceeds; if none, charges its cost to the rates and returns nil. A rate is a leaky
-- bucket (GCRA): `{name}_until` is when it is empty; a minute ahead it is full. A submission worth more than a minute
-- is accepted when the bucket is empty. A bucket that was filled later than now is as full as it was then: the clock was
-- set back.
-- GCRA needs one number for each rate, keeps no history, and gives the exact time to wait. Refusing
-- larger submissions for ever would turn the rate limit into a size limit.
local function over_limit(limits)
  local queued, all_cells, jobs, cells, bytes =
    unpack(redis.call('HMGET', 'ms:usage', '/queued', '/cells', tenant .. '/jobs', tenant .. '/cells', tenant .. '/bytes'))
  for _, check in ipairs({ -- limit, used, requested, unit
    {'queue_limit', queued, 1, 1},
    {'jobs_in_flight', jobs, 1, 1},
    {'sweep_cells', cells, record.cells_expected, 1},
    {'sweep_cells_waiting', all_cells, record.cells_expected, 1},
    {side and side.limit or '', side and count_side(), side and 1 or 0, 1},
    {'webhooks_pending', record.callback and redis.call('SCARD', 'ms:hook-pending:' .. tenant), record.callback and 1 or 0, 1},
    {'capture_mib', bytes, args.files and 1 or 0, MIB}, -- their size is unknown in advance: accepted until the limit is reached
  }) do
    local name, used, more, unit = unpack(check)
    local refused = over(limits, name, tonumber(used) or 0, more, unit)
    if refused then
      return refused
    end
  end
  local rate, this_minute, lasts = key('rate', tenant), math.floor(now / 60), 60
  local minute, requests, requests_until, tokens, tokens_until =
    unpack(redis.call('HMGET', rate, 'minute', 'requests', 'requests_until', 'tokens', 'tokens_until'))
  local taken, new = {'minute', this_minute}, tonumber(minute) ~= this_minute
  local set_back = 60 * ((tonumber(minute) or 0) - this_minute) -- seconds
  if set_back > 60 then -- less: processes whose clocks differ, at the end of a minute
    requests_until, tokens_until = (tonumber(requests_until) or 0) - set_back, (tonumber(tokens_until) or 0) - set_back
    redis.call('HSET', rate, 'minute', this_minute, 'requests', 0, 'tokens', 0, 'requests_until', requests_until, 'tokens_until', tokens_until)
  end
  for _, rated in ipairs({{'requests', 1, requests, requests_until}, {'tokens', record.cost, tokens, tokens_until}}) do
    local name, more, counted, till = unpack(rated)
    local allowed = limits[name .. '_per_minute']
    till = math.max(now, tonumber(till) or 0)
    if allowed > 0 then
      local after = till + more * 60 / allowed
      local wait = math.min(after - 60, till) - now
      if wait > 0 then
        return {'refused', name .. '_per_minute', math.ceil((till - now) * allowed / 60), allowed, string.format('%.6f', wait)}
      end
      lasts, till = math.max(lasts, after - now), after
    end
    for _, value in ipairs({name, (not new and tonumber(counted) or 0) + more, name .. '_until', string.format('%.6f', till)}) do
      taken[#taken + 1] = value
    end
  end
  redis.call('HSET', rate, unpack(taken))
  redis.call('EXPIRE', rate, math.ceil(lasts))
end

-- The first limit of Redis' memory that a submission exceeds. A tenant's unfinished jobs keep at most as much room as is then left for
-- everybody: one tenant gets half of it, a second one half of the rest, and so on; its only job needs no more than there is. A fixed
-- share for each would need the number of tenants.
local function over_memory(percent)
  local used, maxmemory = tonumber(ARGV[2]), tonumber(ARGV[3])
  if maxmemory == 0 then
    return
  end
  local allowed = maxmemory * percent / 100
  if record.room > allowed / 2 and used - record.room < allowed then
    return {'refused', 'job_room', 0, math.floor(allowed / 2 / MIB), ''}
  end
  if used >= allowed then
    return {'refused', 'redis_fill', math.floor(100 * used / maxmemory), percent, ''}
  end
  local kept = tonumber(redis.call('HGET', 'ms:usage', tenant .. '/room')) or 0
  if kept > 0 and kept + record.room > allowed - used then
    return {'refused', 'tenant_room', math.ceil(kept / MIB), math.floor((allowed - used + record.room + kept) / 2 / MIB), ''}
  end
end

local before = accepted_before(idem, args.body, id)
if before then
  return before
end
local stored = redis.call('HGET', key('job', id), 'spec')
if stored then -- a repeat: the client's connection broke before the reply arrived
  return {stored == spec and 'created' or 'exists', id}
end
for _, blob in ipairs(args.blobs) do
  local name, bytes = unpack(blob)
  if not bytes and redis.call('EXISTS', key('pinned', name), key('blob', name)) == 0 then
    return {'missing', name} -- its module was changed or deleted since the look-up
  end
end
if side and redis.call('EXISTS', side.record) == 0 then
  return {'missing', side.record} -- deleted since the look-up
end
local limits, own = limits_for(tenant)
local refused = closed(tenant) or over_memory(limits.redis_fill) or over_limit(limits)
if refused then
  return refused
end
if own.highest_priority and URGENCY[record.priority] < URGENCY[own.highest_priority] then
  record.priority = own.highest_priority
end
record.spec, record.queued, record.step = spec, args.at, STEPS[record.kind][record.priority]
for _, tensor in ipairs(args.blobs) do
  copy_for_job(unpack(tensor))
end
local fields = {}
for name, value in pairs(record) do
  fields[#fields + 1] = name
  fields[#fields + 1] = value
end
redis.call('HSET', key('job', id), unpack(fields))
redis.call('ZADD', 'ms:jobs', created, id)
redis.call('ZADD', key('jobs', tenant), created, id) -- its tenant's own list
redis.call('SADD', 'ms:owners', tenant)
if tags then -- outlives the job's record: files stay until they are deleted
  redis.call('HSET', key('capture', id), 'tags', tags, 'created', created, 'status', 'pending', 'bytes', 0, 'rows', 0, 'model', model,
    'tenant', tenant, 'identity', record.identity)
  if args.charged then
    redis.call('HSET', key('capture', id), 'charged', tenant)
    tally_from_here(key('capture', id))
  end
  redis.call('ZADD', 'ms:captures', created, id)
  redis.call('ZADD', key('captures', tenant), created, id)
end
if args.packed_run then -- the name now points at this job
  redis.call('HSET', key('runs', model), record.run, args.packed_run)
end
if idem then
  redis.call('SET', key('idem', idem), id .. ':' .. args.body, 'EX', args.result_ttl)
end
if side then
  redis.call('SADD', side.open, id)
end
local job = read(id)
list_job(id, 'queued', tenant, created)
enter(job)
if record.cells_expected > 0 then
  tally_cells(job, job.cells_expected)
end
event(job, 'state', '{"state":"queued","attempt":0}')
count(job)
redis.call('PUBLISH', key('changed', id), '1 queued')
return {'created', id}
