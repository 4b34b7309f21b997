-- A batch of receipts of one stream, committed together with the stream's mark, the tickets and the jobs.
-- keys: the mark of (worker, rank, epoch)
-- args: then (seq, job, request, rank, pp, attempt, status, kind, checksum, actions, message, packed receipt,
--       bytes and rows of its files, worker, its boot, epoch of the rank's ledger, token rows edited) per receipt, by seq
-- returns {mark, applied, duplicate, stale, unknown, beyond a gap, {worker, what its ranks disagree on, ...},
--          partial and error among the applied, {id, model, created, generated of each job that has succeeded with it, ...}}
local WIDTH = 18
local before = tonumber(redis.call('GET', KEYS[1]) or '0')
local mark = before
local applied, duplicate, stale, unknown, beyond = 0, 0, 0, 0, 0
local partial, errors = 0, 0
local jobs, touched, disagreements, succeeded = {}, {}, {}, {}

local function place(rank, pp)
  return 'rank ' .. rank .. ' (stage ' .. pp .. ')'
end

-- The accounts of two ranks of a stage; ledgers are named where they are not of the same epoch.
local function difference(request, pp, first, second)
  local function account(told)
    local epoch = first.epoch ~= second.epoch and ' of its ledger number ' .. told.epoch or ''
    local edited = first.edited ~= second.edited and ' and ' .. told.edited .. ' edited rows' or ''
    return 'rank ' .. told.rank .. ' reports checksum ' .. told.sum .. ' after ' .. told.count .. ' actions' .. epoch .. edited
  end
  return 'request ' .. request .. ', stage ' .. pp .. ': ' .. account(first) .. ', ' .. account(second)
end

-- What a rank tells of a request against what the first rank of its stage told; nil when that is the same, or it is the first.
local function compare(job, request, rank, pp, checksum, actions, epoch, edited)
  local field, told = request .. '/' .. pp, checksum .. ':' .. actions .. ':' .. epoch .. ':' .. edited
  if redis.call('HSETNX', key('agree', job.id), field, told .. ':' .. rank) == 1 then
    return nil
  end
  local first = {}
  first.sum, first.count, first.epoch, first.edited, first.rank =
    string.match(redis.call('HGET', key('agree', job.id), field), '^(.*):(.*):(.*):(.*):(.*)$')
  if first.sum .. ':' .. first.count .. ':' .. first.epoch .. ':' .. first.edited == told then
    return nil
  end
  local detail = difference(request, pp, first, {sum = checksum, count = actions, epoch = epoch, edited = edited, rank = rank})
  return detail, math.max(tonumber(epoch), tonumber(first.epoch))
end

local function receive(id, request, rank, pp, attempt, status, kind, checksum, actions, message, packed, bytes, rows, worker, boot,
    epoch, edited)
  local job = jobs[id]
  if job == nil then
    job = read(id) or false
    jobs[id] = job
  end
  if bytes ~= '0' and redis.call('HEXISTS', key('capture', id), 'deleted') == 1 then
    redis.call('ZADD', 'ms:deleting', now, id) -- written after it was deleted: it is to be removed again
  end
  if status ~= 'ok' and status ~= 'partial' then
    status = 'error' -- what we do not know is not fine
  end
  if not job or tonumber(request) >= job.prompts then
    unknown = unknown + 1 -- a request that the job does not have must not count towards those it has
  elseif not working(job, attempt) then
    stale = stale + 1
  elseif redis.call('HSETNX', key('ticket', id), request .. '/' .. rank, packed) == 0 then
    duplicate = duplicate + 1
  else
    applied = applied + 1
    partial = partial + (status == 'partial' and 1 or 0)
    errors = errors + (status == 'error' and 1 or 0)
    local sweep = job.kind == 'sweep' -- its worker reads the ticket, unit by unit
    job.receipts = job.receipts + (sweep and 0 or 1)
    if not job.touched and not sweep then
      job.touched = true
      touched[#touched + 1] = job
    end
    if status == 'partial' then
      job.partial = '1'
      redis.call('HSET', key('job', id), 'partial', '1')
    end
    if not sweep then
      redis.call('HINCRBY', key('job', id), 'receipts', 1)
    end
    if bytes ~= '0' and redis.call('EXISTS', key('capture', id)) == 1 then
      redis.call('HINCRBY', key('capture', id), 'bytes', bytes)
      redis.call('HINCRBY', key('capture', id), 'rows', rows)
      if redis.call('HEXISTS', key('capture', id), 'deleted') == 0 then
        charge(id, tonumber(bytes))
      end
    end
    -- An error or a disagreement ends the attempt at once; what is wanted no more is not failed, its cancel is under way.
    local running, detail, last_epoch = job.state == 'running', nil, nil
    if running and status ~= 'error' then
      detail, last_epoch = compare(job, request, rank, pp, checksum, actions, epoch, edited)
    end
    if detail or not sweep then
      event(job, 'receipt', '{"request":' .. request .. ',"rank":' .. rank .. ',"status":"' .. (detail and 'disagrees' or status) .. '"}')
    end
    if detail then
      disagreements[#disagreements + 1] = worker
      disagreements[#disagreements + 1] = detail
      mark_desync(worker, boot, last_epoch, detail)
      put_back_desynced(job, detail)
      if job.state == 'queued' then
        look_at(job, now) -- nobody sends its message but the sweeper
      end
    elseif running and status == 'error' and not sweep then
      if kind == '' then
        kind = (job.captures or not job.steers) and 'capture_failed' or 'intervention_failed'
      end
      fail(job, kind, 'request ' .. request .. ', ' .. place(rank, pp) .. ': ' .. (message ~= '' and message or 'no reason was given'))
    end
  end
end

for at = FIRST, #ARGV, WIDTH do
  local seq = tonumber(ARGV[at])
  if seq <= mark then
    duplicate = duplicate + 1
  elseif seq == mark + 1 then
    mark = seq
    receive(unpack(ARGV, at + 1, at + WIDTH - 1))
  else
    beyond = beyond + 1
  end
end
if mark > before then
  redis.call('SET', KEYS[1], mark, 'EX', MARK_TTL_S)
end
for _, job in ipairs(touched) do
  if not TERMINAL[job.state] then
    if not finish(job) then
      changed(job)
    elseif job.state == 'succeeded' then
      local created, generated = unpack(redis.call('HMGET', key('job', job.id), 'created', 'generated'))
      for _, told in ipairs({job.id, job.model, created, generated}) do
        succeeded[#succeeded + 1] = told
      end
    end
  end
end
return {mark, applied, duplicate, stale, unknown, beyond, disagreements, partial, errors, succeeded}
