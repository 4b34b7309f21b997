-- What every script shares: how a job is read, moved to another state, failed, put back, finished.
-- Above this text stand the generated tables ALLOWED, TERMINAL, STAMP, PROBLEMS and the constant QUEUED_LOOK_S.
-- Keys are built from job ids inside the scripts: Redis Cluster is not a target.

local now = tonumber(ARGV[1])
local result_ttl = tonumber(ARGV[2])
local event_limit = tonumber(ARGV[3])
local max_attempts = tonumber(ARGV[4])
local FIRST = 5 -- where a script's own arguments begin

local function key(kind, id)
  return 'ms:' .. kind .. ':' .. id
end

local FIELDS = {
  'state', 'attempt', 'version', 'worker', 'boot', 'lease', 'generated', 'receipts', 'expected',
  'captures', 'steers', 'partial', 'kind', 'model', 'asked', 'prompts',
}

-- The job as a table, or nil when there is none.
local function read(id)
  local values = redis.call('HMGET', key('job', id), unpack(FIELDS))
  if not values[1] then
    return nil
  end
  local job = {id = id}
  for place, name in ipairs(FIELDS) do
    job[name] = values[place]
  end
  for _, name in ipairs({'attempt', 'version', 'lease', 'generated', 'receipts', 'expected', 'asked', 'prompts'}) do
    job[name] = job[name] and tonumber(job[name])
  end
  job.captures = job.captures == '1'
  job.steers = job.steers == '1'
  return job
end

-- Whether a worker that claimed `attempt` still has a say in this job: the fence.
local function working(job, attempt)
  return (job.state == 'running' or job.state == 'cancelling') and job.attempt == tonumber(attempt)
end

local function event(job, kind, data)
  redis.call('XADD', key('events', job.id), 'MAXLEN', '~', event_limit, '*', 'e',
    '{"event":"' .. kind .. '","data":' .. data .. ',"attempt":' .. job.attempt .. '}')
end

-- A change that readers may want to see.
local function changed(job)
  job.version = redis.call('HINCRBY', key('job', job.id), 'version', 1)
  redis.call('PUBLISH', key('changed', job.id), job.version)
end

local function look_at(job, at)
  redis.call('ZADD', 'ms:live', at, job.id)
end

-- What is listed of a job's captures. False when it has none in files.
local function note_capture(job, ...)
  if redis.call('EXISTS', key('capture', job.id)) == 0 then
    return false
  end
  redis.call('HSET', key('capture', job.id), ...)
  return true
end

-- The only place where a job's state changes. False, and nothing done, when the table does not allow it.
-- `capture_status`: what a capturing job ends with when it ends otherwise than succeeded.
local function move(job, to, capture_status)
  if not ALLOWED[job.state][to] then
    return false
  end
  local hash = key('job', job.id)
  if (job.state == 'running' or job.state == 'cancelling') and to ~= 'cancelling' then
    redis.call('SREM', key('held', job.worker), job.id)
  end
  job.state = to
  redis.call('HSET', hash, 'state', to, STAMP[to], ARGV[1])
  event(job, 'state', '{"state":"' .. to .. '","attempt":' .. job.attempt .. '}')
  if to == 'queued' then
    -- What the former attempt left must not be taken for the next one's.
    redis.call('DEL', key('out', job.id), key('ticket', job.id), key('agree', job.id))
    redis.call('HDEL', hash, 'worker', 'boot', 'lease', 'started', 'generated', 'partial')
    redis.call('HSET', hash, 'receipts', 0, 'expected', 0)
    note_capture(job, 'bytes', 0, 'rows', 0)
    look_at(job, now + QUEUED_LOOK_S)
  end
  if TERMINAL[to] then
    if job.captures then
      local status = capture_status or 'error'
      if to == 'succeeded' then
        status = job.partial and 'partial' or 'ok'
      end
      redis.call('HSET', hash, 'capture_status', status)
      if note_capture(job, 'status', status) then
        redis.call('ZADD', 'ms:captured', now, job.id) -- their age counts from here
      end
    end
    event(job, 'done', '{"state":"' .. to .. '"}')
    redis.call('ZREM', 'ms:live', job.id)
    redis.call('DEL', key('agree', job.id))
    -- The record outlives its result, so that a late reader is told `expired` and not `unknown`.
    redis.call('EXPIRE', hash, 2 * result_ttl)
    for _, kind in ipairs({'out', 'ticket', 'events'}) do
      redis.call('EXPIRE', key(kind, job.id), result_ttl)
    end
  end
  changed(job)
  return true
end

local function fail(job, kind, detail, capture_status)
  if not ALLOWED[job.state]['failed'] then
    return false
  end
  local problem = PROBLEMS[kind]
  redis.call('HSET', key('job', job.id), 'error', cjson.encode({
    type = 'urn:midstream:' .. kind, title = problem[1], status = problem[2], detail = detail,
  }))
  return move(job, 'failed', capture_status)
end

-- The worker is gone or gives up its hold: another attempt, unless there were enough or nobody wants it any more.
local function put_back(job)
  if job.state == 'cancelling' then
    move(job, 'cancelled')
  elseif job.attempt >= max_attempts then
    fail(job, 'worker_lost', 'attempt ' .. job.attempt .. ' of ' .. max_attempts .. ' ended with the loss of worker '
      .. job.worker .. '; there will be no other')
  else
    move(job, 'queued')
  end
end

-- The finish rule: outputs stored and every expected receipt arrived. Errors and disagreement have ended the job before.
local function finish(job)
  if not job.generated or job.receipts < job.expected then
    return false
  end
  return move(job, job.state == 'cancelling' and 'cancelled' or 'succeeded')
end
