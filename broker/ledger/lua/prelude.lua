-- How a job is moved to another state, failed, put back, finished.

-- What is listed of a job's captures. False when it has none in files.
local function note_capture(job, ...)
  if redis.call('EXISTS', key('capture', job.id)) == 0 then
    return false
  end
  redis.call('HSET', key('capture', job.id), ...)
  return true
end

-- How often jobs came into each state: what metrics tell. Here, so that each change is counted once, whoever makes it.
local function count(job)
  redis.call('HINCRBY', 'ms:counts', job.model .. '/' .. job.state, 1)
end

-- The only place where a job's state changes. False, and nothing done, when the table does not allow it.
-- `capture_status`: what a capturing job ends with when it ends otherwise than succeeded.
local function move(job, to, capture_status)
  if not ALLOWED[job.state][to] then
    return false
  end
  local hash, from = key('job', job.id), job.state
  if (job.state == 'running' or job.state == 'cancelling') and to ~= 'cancelling' then
    redis.call('SREM', key('held', job.worker), job.id)
  end
  job.state = to
  redis.call('HSET', hash, 'state', to, STAMP[to], ARGV[1])
  event(job, 'state', '{"state":"' .. to .. '","attempt":' .. job.attempt .. '}')
  announce(job)
  count(job)
  if from == 'queued' then
    leave(job)
  end
  if to == 'queued' then
    -- What the former attempt left must not be taken for the next one's. (Units of a sweep are its own: they stay.)
    redis.call('DEL', key('out', job.id), key('ticket', job.id), key('agree', job.id))
    redis.call('HDEL', hash, 'worker', 'boot', 'lease', 'started', 'generated', 'partial', 'everyone', 'global_version')
    redis.call('HSET', hash, 'receipts', 0, 'expected', 0)
    job.generated, job.receipts, job.expected, job.partial = nil, 0, 0, nil
    if job.kind ~= 'sweep' then
      charge(job.id, -(tonumber(redis.call('HGET', key('capture', job.id), 'bytes')) or 0))
      note_capture(job, 'bytes', 0, 'rows', 0)
    end
    enter_again(job)
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
    tally(hash, job.tenant, 'jobs', -1)
    if job.kind == 'sweep' then
      tally_cells(job, job.cells - job.cells_expected)
    end
    event(job, 'done', '{"state":"' .. to .. '"}')
    redis.call('ZREM', 'ms:live', job.id)
    redis.call('DEL', key('agree', job.id))
    -- The record outlives its result, so that a late reader is told `expired` and not `unknown`.
    redis.call('EXPIRE', hash, 2 * result_ttl)
    for _, kind in ipairs({'out', 'ticket', 'events', 'units'}) do
      redis.call('EXPIRE', key(kind, job.id), result_ttl)
    end
  end
  changed(job)
  return true
end

-- `to`: 'aborted' for what never began.
local function fail(job, kind, detail, capture_status, to)
  to = to or 'failed'
  if not ALLOWED[job.state][to] then
    return false
  end
  local problem = PROBLEMS()[kind]
  redis.call('HSET', key('job', job.id), 'error', cjson.encode({
    type = 'urn:midstream:' .. kind, title = problem[1], status = problem[2], detail = detail,
  }))
  return move(job, to, capture_status)
end

local LATE = 'no worker had begun the job when its `expires_in` was over'

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

-- The ranks of this worker disagree: it takes no jobs until they were made equal. Late news of ledgers that are settled, or of a
-- former start of the worker, mark nothing.
local function mark_desync(worker, boot, epoch, detail)
  local alive = redis.call('GET', key('alive', worker))
  if alive and alive ~= boot then
    return
  end
  local settled_boot, settled_epoch = string.match(redis.call('HGET', SETTLED, worker) or '', '^(.*)/(.*)$')
  if settled_boot ~= boot or tonumber(epoch) > tonumber(settled_epoch) then
    redis.call('HSETNX', DESYNC, worker, detail)
  end
end

-- Its ranks disagreed, or their ledgers began anew under it: another attempt, once, or none (setting on_desync).
local function put_back_desynced(job, detail)
  if job.state == 'cancelling' then
    move(job, 'cancelled')
  elseif job.state ~= 'running' then
    return
  elseif on_desync == 'retry' and not job.retried and job.attempt < max_attempts then
    redis.call('HSET', key('job', job.id), 'retried', detail)
    job.retried = detail
    move(job, 'queued')
  else
    fail(job, 'ranks_disagree', detail)
  end
end

-- The tensor is not this owner's any more; nobody's tensor is not kept.
local function unpin(name, owner)
  redis.call('SREM', key('pinners', name), owner)
  if redis.call('SCARD', key('pinners', name)) == 0 then
    redis.call('DEL', key('pinned', name))
  end
end

-- Let `owner` hold these tensors, and no others any more: `count` pairs of (sha256, bytes, '' if it is pinned already) in ARGV from
-- `first` on. Returns the first that is nowhere, and has done nothing then.
local function pin(owner, first, count)
  local wanted = {}
  for at = first, first + 2 * count - 1, 2 do
    if ARGV[at + 1] == '' and redis.call('EXISTS', key('pinned', ARGV[at])) == 0 then
      return ARGV[at]
    end
    wanted[ARGV[at]] = true
  end
  for at = first, first + 2 * count - 1, 2 do
    if ARGV[at + 1] ~= '' then
      redis.call('SET', key('pinned', ARGV[at]), ARGV[at + 1])
    end
    redis.call('SADD', key('pinners', ARGV[at]), owner)
    redis.call('SADD', key('pins', owner), ARGV[at])
  end
  for _, name in ipairs(redis.call('SMEMBERS', key('pins', owner))) do
    if not wanted[name] then
      redis.call('SREM', key('pins', owner), name)
      unpin(name, owner)
    end
  end
end

-- What one owner held is another's now, who lets go of what it had.
local function hand_over(owner, heir)
  local left = redis.call('SMEMBERS', key('pins', owner))
  local former = redis.call('SMEMBERS', key('pins', heir))
  redis.call('DEL', key('pins', owner), key('pins', heir))
  for _, name in ipairs(left) do
    redis.call('SADD', key('pinners', name), heir)
    redis.call('SADD', key('pins', heir), name)
    redis.call('SREM', key('pinners', name), owner)
  end
  for _, name in ipairs(former) do
    if redis.call('SISMEMBER', key('pins', heir), name) == 0 then
      unpin(name, heir)
    end
  end
end

local function close_proposal(state)
  redis.call('HDEL', state, 'proposal_id', 'proposal_version', 'proposal_deadline', 'proposal', 'proposed')
end
