-- A job's record: reading it, and notifying readers of changes.

-- worker -> why its ranks need a resync; worker -> boot/epoch of its action ledgers up to which disagreements are resolved.
local DESYNC, SETTLED = 'ms:desync', 'ms:desync-settled'

local function key(kind, id)
  return 'ms:' .. kind .. ':' .. id
end

local FIELDS = {
  'state', 'attempt', 'version', 'worker', 'boot', 'lease', 'generated', 'receipts', 'expected',
  'captures', 'steers', 'everyone', 'partial', 'kind', 'model', 'asked', 'prompts', 'retried', 'cells_expected',
  'tenant', 'priority', 'expires', 'callback', 'step', 'cost', 'cells', 'shelved', 'identity', 'created', 'queue', 'room',
}

-- The job as a table, or nil if there is none.
local function read(id)
  local values = redis.call('HMGET', key('job', id), unpack(FIELDS))
  if not values[1] then
    return nil
  end
  local job = {id = id}
  for place, name in ipairs(FIELDS) do
    job[name] = values[place]
  end
  for _, name in ipairs({'attempt', 'version', 'lease', 'generated', 'receipts', 'expected', 'asked', 'prompts', 'cells_expected',
    'cells', 'expires', 'cost', 'room'}) do
    job[name] = job[name] and tonumber(job[name])
  end
  -- Jobs from before tenants existed have neither a tenant nor a step.
  job.tenant = job.tenant or 'default'
  job.step = tonumber(job.step) or (STEPS[job.kind] or STEPS.generate).normal
  job.queue = job.queue or '' -- before there were several
  job.line = job.queue == '' and job.step or job.step .. '.' .. job.queue -- see dispatch.lua
  job.captures = job.captures == '1'
  job.steers = job.steers == '1' or job.everyone == '1' -- by its own entries or by global steering
  return job
end

-- What was accepted under this Idempotency-Key: {'created' (this very call, repeated), 'repeated' or 'mismatch', its id}; nil
-- if there is none. `family`: of the records of what is being accepted, if that is no job.
local function accepted_before(idem, body, id, family)
  local first = idem and redis.call('GET', key('idem', idem))
  if not first then
    return nil
  end
  local first_id, first_body = string.match(first, '^([^:]+):(.*)$')
  -- What is no job removes its key with its record.
  local of = string.sub(first_id, 1, 4) == 'job_' and 'job' or family
  if of and redis.call('EXISTS', key(of, first_id)) == 0 then
    return nil
  end
  return {first_body ~= body and 'mismatch' or first_id == id and 'created' or 'repeated', first_id}
end

-- The fence: whether `attempt` is current and has not ended.
local function working(job, attempt)
  return (job.state == 'running' or job.state == 'cancelling') and job.attempt == tonumber(attempt)
end

-- The job if `attempt` is current; otherwise nil and 'unknown' or 'stale'.
local function job_of(id, attempt)
  local job = read(id)
  if not job then
    return nil, 'unknown'
  elseif not working(job, attempt) then
    return nil, 'stale'
  end
  return job
end

-- What scripts need of the policies that act on the job, see `core/record.py`: policy -> {latch_s, registered, hook}; and the key of
-- a policy's latch, which has the time of the policy's registration (empty: accepted before it was recorded): no other registration finds
-- it, even under the same name.
local function policies_of(job)
  local policies, conversation = unpack(redis.call('HMGET', key('job', job.id), 'policies', 'conversation'))
  policies = policies and cjson.decode(policies) or {}
  return policies, function(policy)
    return key('latch', table.concat({job.tenant, policy, policies[policy].registered or '', conversation or '', job.model}, ':'))
  end
end

-- The latches of the job's conversation at its first claim: {policy, job that set it, ...}. Every later attempt decides by the same.
-- Those of the claim, not of the moment: the result of a running request would depend on timing.
local function latched(job)
  local known = redis.call('HGET', key('job', job.id), 'latched')
  if known then
    return cjson.decode(known)
  end
  local result, policies, latch = {}, policies_of(job)
  for policy, entry in pairs(policies) do
    local holder = entry.latch_s and redis.call('GET', latch(policy))
    if holder then
      result[#result + 1] = policy
      result[#result + 1] = holder
    end
  end
  if next(policies) then
    redis.call('HSET', key('job', job.id), 'latched', cjson.encode(result))
  end
  return result
end

-- Maximum length of the job's event stream: a sweep's holds all its cells.
local function events_kept(job)
  if not GRIDS[job.kind] then
    return args.event_limit
  end
  return math.max(args.event_limit, job.cells_expected + SWEEP_EVENTS)
end

local function event(job, kind, data)
  redis.call('XADD', key('events', job.id), 'MAXLEN', '~', events_kept(job), '*', 'e',
    '{"event":"' .. kind .. '","data":' .. data .. ',"attempt":' .. job.attempt .. '}')
end

-- Publish a change to readers: its version, and the new state (`generated` while only receipts are awaited).
local function changed(job)
  job.version = redis.call('HINCRBY', key('job', job.id), 'version', 1)
  local state = job.state == 'running' and job.generated and 'generated' or job.state
  redis.call('PUBLISH', key('changed', job.id), job.version .. ' ' .. state)
end

local function look_at(job, at)
  redis.call('ZADD', 'ms:live', at, job.id)
end
