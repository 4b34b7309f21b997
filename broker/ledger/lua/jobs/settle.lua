-- A batch of receipts of one stream, committed together with the stream's mark, the tickets and the jobs.
-- keys: the mark of (worker, rank, epoch)
-- args: receipts: {seq, job, request, rank, pp, attempt, status, packed receipt, bytes and rows of its files, account, about, whether a
--       probe flags it, policies that act on it and were on: {policy, number of its own triggers, decision as JSON, ...}, all policies
--       that read it: {policy, whether it was on, whether it acted then, its hit packed or false, the tokens around that packed or
--       false, ...}} of each, by seq; hits_kept, hits_ttl (of a policy). Values that are not read separately are joined: an account is checksum:actions:epoch:edited (epoch of the rank's action ledger, number of token rows edited); about is
--       worker, its boot, kind and message, separated by zero bytes
-- returns {mark, applied, duplicate, stale, unknown, beyond a gap, {worker, disagreement of its ranks, ...},
--          partial and error among the applied, {id, model, created, generated of each job that has succeeded by it, ...}}
local before = tonumber(redis.call('GET', KEYS[1]) or '0')
local mark = before
local applied, duplicate, stale, unknown, beyond = 0, 0, 0, 0, 0
local partial, errors = 0, 0
local jobs, known_jobs, touched, files = {}, {}, {}, {}
local disagreements, succeeded = {}, {}

-- The job's capture record, read for the first receipt that names bytes; false if it has none in files.
local function listed(id)
  if files[id] == nil then
    files[id] = false
    if redis.call('EXISTS', key('capture', id)) == 1 then
      files[id] = {bytes = 0, rows = 0, deleted = redis.call('HEXISTS', key('capture', id), 'deleted') == 1}
      if files[id].deleted then
        redis.call('ZADD', 'ms:deleting', now, id) -- written after its deletion: must be removed again
      end
    end
  end
  return files[id]
end

-- Write what a job's receipts have added to its counters since the last call: one write per counter for many receipts. Code that reads
-- or resets a counter in Redis must call this first.
local function note(job)
  if job.more > 0 then
    redis.call('HINCRBY', key('job', job.id), 'receipts', job.more)
    job.more = 0
  end
  local held = files[job.id]
  if held and held.more then
    redis.call('HINCRBY', key('capture', job.id), 'bytes', held.bytes)
    redis.call('HINCRBY', key('capture', job.id), 'rows', held.rows)
    if not held.deleted then
      charge(job.id, held.bytes)
    end
    held.bytes, held.rows, held.more = 0, 0, false
  end
end

local function place(rank, pp)
  return 'rank ' .. rank .. ' (stage ' .. pp .. ')'
end

local function parts(account)
  local part = {}
  part.sum, part.count, part.epoch, part.edited, part.rank = string.match(account, '^(.*):(.*):(.*):(.*):(.*)$')
  return part
end

-- Describe the accounts of two ranks of a stage; action ledgers are named if their epochs differ.
local function difference(request, pp, first, second)
  local function account(part)
    local epoch = first.epoch ~= second.epoch and ' of its ledger number ' .. part.epoch or ''
    local edited = first.edited ~= second.edited and ' and ' .. part.edited .. ' edited rows' or ''
    return 'rank ' .. part.rank .. ' reports checksum ' .. part.sum .. ' after ' .. part.count .. ' actions' .. epoch .. edited
  end
  return 'request ' .. request .. ', stage ' .. pp .. ': ' .. account(first) .. ', ' .. account(second)
end

-- Set the latches of the conversation, and send the webhooks, of policies that were on: in the commit of the decision itself. A policy
-- that only inherited its latch does not set it again, or busy conversations would keep it for ever.
local function act(job, request, decided)
  local policies, latch = policies_of(job)
  for place = 1, #decided, 3 do
    local policy, triggers, detail = unpack(decided, place, place + 2)
    local entry, mark = policies[policy] or {}, policy .. '_' .. request
    -- At the receipt, not at the job's end: a job that fails later has triggered all the same.
    if entry.latch_s and triggers > 0 then
      redis.call('SET', latch(policy), job.id, 'NX', 'EX', entry.latch_s)
    end
    if entry.hook then
      announce(job, 'decided', {mark = mark .. '_policy', detail = detail, hook = entry.hook})
    end
    announce(job, 'decided', {mark = mark, detail = detail})
  end
end

-- Count a prompt in the present day of the policies that read it, 1 for true and 0 for false: a ring of `POLICY_DAYS` days for each policy
-- that is still registered, which also keeps its hit. Name on the job those that were on, and whether they acted. Of a stage's ranks the
-- first counts: each reports the decisions about a request that fails.
local function tally(job, request, pp, readers)
  if #readers == 0 or redis.call('HSETNX', key('agree', job.id), request .. '/' .. pp .. '/read', 1) == 0 then
    return
  end
  local day, marks = math.floor(now / 86400), nil
  for place = 1, #readers, 5 do
    local policy, slot = readers[place], day % POLICY_DAYS
    if readers[place + 1] == 1 then
      marks = marks or cjson.decode(redis.call('HGET', key('job', job.id), 'triggered') or '{}')
      marks[policy] = marks[policy] or readers[place + 2] == 1
    end
    if redis.call('HEXISTS', key('policies', job.model), policy) == 1 then
      local days = key('policy-days', job.model .. ':' .. policy)
      local known = redis.call('HGET', days, slot)
      local counts = known and cjson.decode(known) or {}
      if counts[1] ~= day then
        counts = {day, 0, 0, 0}
      end
      for count, more in ipairs({1, readers[place + 1], readers[place + 2]}) do
        counts[count + 1] = counts[count + 1] + more
      end
      redis.call('HSET', days, slot, cjson.encode(counts))
      keep_hit(job, request, policy, readers[place + 3], readers[place + 4])
    end
  end
  if marks then
    redis.call('HSET', key('job', job.id), 'triggered', cjson.encode(marks))
  end
end

-- Compare a rank's report on a request with that of the first rank of its stage. Returns the difference and the later of their epochs;
-- nil if they agree, or this is the first.
local function compare(job, request, rank, pp, account)
  local agree, field = key('agree', job.id), request .. '/' .. pp
  local report = account .. ':' .. rank
  if redis.call('HSETNX', agree, field, report) == 1 then
    return nil
  end
  local known = redis.call('HGET', agree, field)
  if string.match(known, '^(.*):') == account then
    return nil
  end
  local first, second = parts(known), parts(report)
  return difference(request, pp, first, second), math.max(tonumber(first.epoch), tonumber(second.epoch))
end

local function receive(id, request, rank, pp, attempt, status, packed, bytes, rows, account, about, flagged, decided, readers)
  local job = jobs[id]
  if job == nil then
    job = read(id) or false
    jobs[id] = job
    if job then
      job.more = 0
      known_jobs[#known_jobs + 1] = job
    end
  end
  local held = bytes ~= 0 and listed(id)
  if status ~= 'ok' and status ~= 'partial' then
    status = 'error' -- an unknown status counts as an error
  end
  if not job or request >= job.prompts then
    unknown = unknown + 1 -- a request that the job does not have must not count
  elseif not working(job, attempt) or string.match(about, '^(.-)%z') ~= job.worker then
    stale = stale + 1 -- of a former attempt, or of a worker that does not have the job
  elseif redis.call('HSETNX', key('ticket', id), request .. '/' .. rank, packed) == 0 then
    duplicate = duplicate + 1
  else
    applied = applied + 1
    partial = partial + (status == 'partial' and 1 or 0)
    errors = errors + (status == 'error' and 1 or 0)
    if flagged then
      redis.call('HSET', key('job', id), 'flagged', 1)
      if job.state == 'running' then
        announce(job, 'flagged')
      end
    end
    if #decided > 0 then
      act(job, request, decided)
    end
    tally(job, request, pp, readers)
    -- Clients of a sweep wait for cells and not for receipts, and an error affects only its own
    -- cell.
    local sweep = READS_RECEIPTS[job.kind] -- its worker reads the ticket, unit by unit
    if not sweep then
      job.receipts, job.more = job.receipts + 1, job.more + 1
      if not job.touched then
        job.touched = true
        touched[#touched + 1] = job
      end
    end
    if status == 'partial' and not job.partial then
      job.partial = '1'
      redis.call('HSET', key('job', id), 'partial', '1')
    end
    if held then
      held.bytes, held.rows, held.more = held.bytes + bytes, held.rows + rows, true
    end
    -- An error or a disagreement ends the attempt immediately; a job that is being cancelled is not failed.
    local running, detail, last_epoch = job.state == 'running', nil, nil
    if running and status ~= 'error' then
      detail, last_epoch = compare(job, request, rank, pp, account)
    end
    if detail or not sweep then
      event(job, 'receipt', '{"request":' .. request .. ',"rank":' .. rank .. ',"status":"' .. (detail and 'disagrees' or status) .. '"}')
    end
    if detail then
      local worker, boot = string.match(about, '^(.-)%z(.-)%z')
      disagreements[#disagreements + 1] = worker
      disagreements[#disagreements + 1] = detail
      mark_desync(worker, boot, last_epoch, detail)
      note(job)
      put_back_desynced(job, detail)
    elseif running and status == 'error' and not sweep then
      local kind, message = string.match(about, '^.-%z.-%z(.-)%z(.*)$')
      if kind == '' then
        kind = (job.captures or not job.steers) and 'capture_failed' or 'intervention_failed'
      end
      note(job)
      local reason = 'request ' .. request .. ', ' .. place(rank, pp) .. ': ' .. (message ~= '' and message or 'no reason was given')
      if kind == STORE_UNAVAILABLE then
        await_store(job, reason)
      else
        fail(job, kind, reason)
      end
    end
  end
end

for _, receipt in ipairs(args.receipts) do
  local seq = receipt[1]
  if seq <= mark then
    duplicate = duplicate + 1
  elseif seq == mark + 1 then
    mark = seq
    receive(unpack(receipt, 2))
  else
    beyond = beyond + 1
  end
end
if mark > before then
  redis.call('SET', KEYS[1], mark, 'EX', MARK_TTL_S)
end
for _, job in ipairs(known_jobs) do
  note(job)
end
for _, job in ipairs(touched) do
  if not TERMINAL[job.state] then
    if not finish(job) then
      changed(job)
    elseif job.state == 'succeeded' then
      local created, generated = unpack(redis.call('HMGET', key('job', job.id), 'created', 'generated'))
      for _, value in ipairs({job.id, job.model, created, generated}) do
        succeeded[#succeeded + 1] = value
      end
    end
  end
end
return {mark, applied, duplicate, stale, unknown, beyond, disagreements, partial, errors, succeeded}
