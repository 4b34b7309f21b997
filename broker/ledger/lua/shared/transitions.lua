-- State transitions of a job: move, fail, put back, finish.

-- Set fields of the job's capture record; false if it has no captures in files.
local function note_capture(job, ...)
  if redis.call('EXISTS', key('capture', job.id)) == 0 then
    return false
  end
  redis.call('HSET', key('capture', job.id), ...)
  return true
end

-- The lists of jobs in a state, by creation time: of all tenants, and the tenant's own.
local function lists_in(state, tenant)
  return key('jobs-in', state), key('jobs-in', state .. ':' .. tenant)
end
local function list_job(id, state, tenant, created)
  local all, own = lists_in(state, tenant)
  redis.call('ZADD', all, created, id)
  redis.call('ZADD', own, created, id)
end

-- Count of entries into each state, for metrics. Kept here so that each change is counted once, whichever process makes it.
local function count(job)
  redis.call('HINCRBY', 'ms:counts', job.model .. '/' .. job.state, 1)
end

-- Effects of leaving a state and of entering one, before readers are notified: `on_leave[state](job, to)` and
-- `on_enter[state](job, capture_status)`. States without an effect are in neither.
local on_leave, on_enter = {}, {}

local function let_go(job, to)
  if to ~= 'cancelling' then
    redis.call('SREM', key('held', job.worker), job.id)
  end
end
on_leave.queued, on_leave.running, on_leave.cancelling = leave, let_go, let_go

function on_enter.queued(job)
  local hash = key('job', job.id)
  -- Drop what the former attempt left, so that it is not attributed to the next. (Units of a sweep belong to the job: they stay.)
  redis.call('DEL', key('out', job.id), key('ticket', job.id), key('agree', job.id))
  redis.call('HDEL', hash, 'worker', 'boot', 'lease', 'started', 'generated', 'partial', 'everyone', 'global_version')
  redis.call('HSET', hash, 'receipts', 0, 'expected', 0)
  job.generated, job.receipts, job.expected, job.partial = nil, 0, 0, nil
  if not GRIDS[job.kind] then
    charge(job.id, -(tonumber(redis.call('HGET', key('capture', job.id), 'bytes')) or 0))
    note_capture(job, 'bytes', 0, 'rows', 0)
  end
  enter_again(job)
end

-- Every terminal state. `capture_status`: final status of the captures of a job that has not succeeded.
local function ended(job, capture_status)
  local hash = key('job', job.id)
  if job.captures then
    local status = capture_status or 'error'
    redis.call('HSET', hash, 'capture_status', status)
    if note_capture(job, 'status', status) then
      redis.call('ZADD', 'ms:captured', now, job.id) -- their age counts from here
    end
  end
  tally(hash, job.tenant, 'jobs', -1)
  tally_room(job, -1)
  if GRIDS[job.kind] then
    tally_cells(job, job.cells - job.cells_expected)
  end
  event(job, 'done', '{"state":"' .. job.state .. '"}')
  redis.call('ZREM', 'ms:live', job.id)
  redis.call('DEL', key('agree', job.id))
  -- The record outlives its result, so that a late reader gets `expired` and not `unknown`.
  redis.call('EXPIRE', hash, 2 * args.result_ttl)
  for _, kind in ipairs({'out', 'ticket', 'events', 'units'}) do
    redis.call('EXPIRE', key(kind, job.id), args.result_ttl)
  end
end
for state in pairs(TERMINAL) do
  on_enter[state] = ended
end
function on_enter.succeeded(job)
  ended(job, job.partial and 'partial' or 'ok')
end

-- The only place where a job's state changes. Returns false, and changes nothing, if the table does not allow it.
local function move(job, to, capture_status)
  local from = job.state
  if not ALLOWED[from][to] then
    return false
  end
  if on_leave[from] then
    on_leave[from](job, to)
  end
  local all, own = lists_in(from, job.tenant)
  redis.call('ZREM', all, job.id)
  redis.call('ZREM', own, job.id)
  list_job(job.id, to, job.tenant, job.created)
  job.state = to
  redis.call('HSET', key('job', job.id), 'state', to, STAMP[to], args.at)
  event(job, 'state', '{"state":"' .. to .. '","attempt":' .. job.attempt .. '}')
  announce(job)
  count(job)
  if on_enter[to] then
    on_enter[to](job, capture_status)
  end
  if TERMINAL[to] then
    report_end(job, from == 'queued' and not job.unsent and job.attempt or job.attempt - 1)
  end
  changed(job)
  return true
end

-- `to`: 'aborted' for a job that never began.
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

local LATE = 'no worker started the job before its `expires_in` ran out'

-- Another attempt will be made; `why` the last one ended.
local function requeue(job, why)
  redis.call('HSET', key('job', job.id), 'retry_reason', why)
  move(job, 'queued')
end

-- The artifact store is unavailable: the job, which is queued or running, waits for it; at most `store_wait` in all, which a sweep
-- counts from its last progress. The attempt does not count.
-- The rows were dropped and will be computed again: held, they would fill
-- `tuning.capture_queue_mib` within seconds and stop every capture.
local function await_store(job, why)
  local hash = key('job', job.id)
  redis.call('HSETNX', hash, 'store_away', args.at)
  if now - tonumber(redis.call('HGET', hash, 'store_away')) >= args.store_wait then
    local kind = redis.call('EXISTS', key('capture', job.id)) == 1 and 'capture_failed' or 'intervention_failed'
    fail(job, kind, why .. '; the job has waited ' .. args.store_wait .. ' s for the artifact store (artifact_wait_s)')
  elseif job.state == 'queued' then
    redis.call('SREM', turn('sent', job.model, job.line), job.id)
    shelve(job)
    fill(job.model, job.line)
  else
    redis.call('HINCRBY', hash, 'excused', 1)
    job.shelved = '1'
    requeue(job, why)
  end
end

-- The worker's model has another identity than the job's: the job fails, or waits for a worker with its model.
local function refuse_model(job)
  if args.on_model_change == 'wait' and (job.identity or '') ~= '' then
    redis.call('SREM', turn('sent', job.model, job.line), job.id)
    shelve(job)
    fill(job.model, job.line)
    return
  end
  local accepted = (job.identity or '') == '' and 'by a version of midstream that recorded no identity of the model'
    or 'for the model with the identity ' .. string.sub(job.identity, 1, SHOWN_IDENTITY)
  fail(job, 'model_changed', 'the job was accepted ' .. accepted .. '; worker ' .. args.worker .. ' serves '
    .. string.sub(args.identity, 1, SHOWN_IDENTITY) .. ' under the name ' .. job.model .. ': submit it again')
end

-- The worker is gone or releases the job, as `why` says: another attempt, unless the limit is reached or the job is being cancelled.
local function put_back(job, why)
  local excused = tonumber(redis.call('HGET', key('job', job.id), 'excused')) or 0
  if job.state == 'cancelling' then
    move(job, 'cancelled')
  elseif job.attempt - excused >= args.max_attempts then
    fail(job, 'worker_lost', 'attempt ' .. job.attempt .. ' of ' .. args.max_attempts .. ' ended with the loss of worker '
      .. job.worker .. '; there will be no other')
  else
    requeue(job, why)
  end
end

-- End the job once its outputs are stored and every expected receipt has arrived. (Errors and disagreements end it earlier.)
local function finish(job)
  if not job.generated or job.receipts < job.expected then
    return false
  end
  return move(job, job.state == 'cancelling' and 'cancelled' or 'succeeded')
end

-- The ranks of this worker disagree: it takes no jobs until they are resynced. Late reports of action ledgers already settled, or of
-- an earlier start of the worker, are ignored.
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

-- The ranks of the attempt disagreed, or their action ledgers were reset during it: one more attempt, or none (setting on_desync).
local function put_back_desynced(job, detail)
  if job.state == 'cancelling' then
    move(job, 'cancelled')
  elseif job.state ~= 'running' then
    return
  elseif args.on_desync == 'retry' and not job.retried and job.attempt < args.max_attempts then
    redis.call('HSET', key('job', job.id), 'retried', detail)
    job.retried = detail
    requeue(job, detail)
  else
    fail(job, 'ranks_disagree', detail)
  end
end
