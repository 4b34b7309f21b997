-- Accept a job: record, blobs, listing and idempotency key in one commit.
-- args: how full Redis is, in percent, id, spec, created, kind, model, prompts, asked, captures, steers, metadata, written_by, idempotency key, body sha256,
--       blob ttl, JSON list of the tags under which captures become files ('' for none), JSON of the named modules, cells of a sweep,
--       JSON of the source runs that it is patched with, name of the run that it makes ('' for none), that run, packed,
--       tenant, priority, when it expires ('' for never), JSON of its callback ('' for none), what it costs (tokens), whether
--       its user captures into files ('1' or '0'), JSON of the limits that hold where the tenant has none of its own,
--       then (sha256, bytes, '' to take what is pinned) per blob
-- returns {'created', id} | {'repeated', id of the first} | {'mismatch', id of the first} | {'exists', id} | {'missing', sha256}
--         | {'refused', name of the limit, what is used, what is allowed, seconds until it would be accepted ('' where nobody knows)}
-- The first limit that stands against a submission, or nil, and then what it takes of the rates is taken. A rate is a bucket that
-- leaks (GCRA): `{name}_until` is when nothing of it is used any more, a minute ahead it is full. What is more than a minute's worth
-- by itself is accepted once nothing is used.
local function over_limit(tenant, limits, job)
  local queued, all_cells, jobs, cells, bytes =
    unpack(redis.call('HMGET', 'ms:usage', '/queued', '/cells', tenant .. '/jobs', tenant .. '/cells', tenant .. '/bytes'))
  for _, check in ipairs({ -- limit, what is used of it, how much more, in units of
    {'queue_limit', queued, 1, 1},
    {'jobs_in_flight', jobs, 1, 1},
    {'sweep_cells', cells, job.cells, 1},
    {'sweep_cells_waiting', all_cells, job.cells, 1},
    {'capture_mib', bytes, job.files, MIB}, -- nobody knows how large they will be: until it is all taken
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
  for _, each in ipairs({{'requests', 1, requests, requests_until}, {'tokens', job.cost, tokens, tokens_until}}) do
    local name, more, counted, till = unpack(each)
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

local fill, id, spec, created, kind, model, prompts, asked, captures, steers, metadata, written_by, idem, body, blob_ttl,
  tags, modules, cells, runs, run, packed_run, tenant, priority, expires, callback, cost, files, defaults = unpack(ARGV, FIRST, FIRST + 27)
local BLOBS = FIRST + 28
if idem ~= '' then
  local first = redis.call('GET', key('idem', idem))
  if first then
    local first_id, first_body = string.match(first, '^([^:]+):(.*)$')
    if redis.call('EXISTS', key('job', first_id)) == 1 then
      if first_body ~= body then
        return {'mismatch', first_id}
      end
      return {first_id == id and 'created' or 'repeated', first_id}
    end
  end
end
local there = redis.call('HGET', key('job', id), 'spec')
if there then -- the same again: a client whose connection broke before it got the answer
  return {there == spec and 'created' or 'exists', id}
end
for at = BLOBS, #ARGV, 2 do
  if ARGV[at + 1] == '' and redis.call('EXISTS', key('pinned', ARGV[at]), key('blob', ARGV[at])) == 0 then
    return {'missing', ARGV[at]} -- its module was changed or taken away since it was looked up
  end
end
local limits, own = limits_for(tenant, defaults)
if tonumber(fill) >= limits.redis_fill then
  return {'refused', 'redis_fill', math.floor(tonumber(fill)), limits.redis_fill, ''}
end
local refused = over_limit(tenant, limits, {cost = tonumber(cost), cells = tonumber(cells), files = tonumber(files)})
if refused then
  return refused
end
if own.highest_priority and URGENCY[priority] < URGENCY[own.highest_priority] then
  priority = own.highest_priority
end
for at = BLOBS, #ARGV, 2 do -- the job's own copies: what becomes of a module is nothing to it
  local blob = key('blob', ARGV[at])
  if ARGV[at + 1] ~= '' then
    redis.call('SET', blob, ARGV[at + 1])
  elseif redis.call('EXISTS', blob) == 0 then
    redis.call('COPY', key('pinned', ARGV[at]), blob)
  end
  redis.call('EXPIRE', blob, blob_ttl)
end
redis.call('HSET', key('job', id), 'spec', spec, 'state', 'queued', 'attempt', 0, 'version', 1, 'created', created, 'queued', ARGV[1],
  'kind', kind, 'model', model, 'prompts', prompts, 'asked', asked, 'captures', captures, 'steers', steers, 'metadata', metadata,
  'modules', modules, 'cells', 0, 'cells_expected', cells, 'runs', runs, 'run', run,
  'tenant', tenant, 'priority', priority, 'step', STEPS[kind][priority], 'cost', cost, 'written_by', written_by, 'receipts', 0, 'expected', 0, 'capture_status', captures == '1' and 'pending' or 'not_requested')
if expires ~= '' then
  redis.call('HSET', key('job', id), 'expires', expires)
end
if callback ~= '' then
  redis.call('HSET', key('job', id), 'callback', callback)
end
redis.call('ZADD', 'ms:jobs', created, id)
redis.call('ZADD', key('jobs', tenant), created, id) -- its tenant's own list
redis.call('SADD', 'ms:owners', tenant)
if tags ~= '' then -- outlives the job's record: files stay until they are deleted
  redis.call('HSET', key('capture', id), 'tags', tags, 'created', created, 'status', 'pending', 'bytes', 0, 'rows', 0, 'model', model,
    'tenant', tenant)
  if files == '1' then
    redis.call('HSET', key('capture', id), 'charged', tenant)
    tally_from_here(key('capture', id))
  end
  redis.call('ZADD', 'ms:captures', created, id)
  redis.call('ZADD', key('captures', tenant), created, id)
end
if run ~= '' then -- from here on the name means this job, whatever it meant before
  redis.call('HSET', key('runs', model), run, packed_run)
end
if idem ~= '' then
  redis.call('SET', key('idem', idem), id .. ':' .. body, 'EX', result_ttl)
end
local job = read(id)
enter(job)
if cells ~= '0' then
  tally_cells(job, job.cells_expected)
end
event(job, 'state', '{"state":"queued","attempt":0}')
count(job)
redis.call('PUBLISH', key('changed', id), '1 queued')
return {'created', id}
