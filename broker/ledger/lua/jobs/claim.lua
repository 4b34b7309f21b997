-- queued -> running: the returned attempt is the worker's fencing token.
-- args: id, worker, boot, ranks, lease_s, blob_ttl, call (random id of this call), unreachable (why the worker's artifact store is
--       unavailable; empty: it is not), identity (of the worker's model), on_model_change ('fail' or 'wait'), queue (that the worker
--       serves), crowded (whether it holds as many surveys as it may: the job, if it is a survey, is sent again after a while)
-- returns {'unknown'} | {'refused', state} | {'desynced', reason}
--         | {'claimed', attempt, spec, time of queueing, latches of its conversation: {policy, job that set it, ...},
--            version of the global steering, its packed entries ('': none), weight of the tenant}
local id, worker = args.id, args.worker
local hash = key('job', id)

-- The attempt runs under the global steering of this moment, to its end. If it has entries, every prompt gets receipts, not only those
-- that the job edits or captures.
local function claimed(job)
  -- Switching running requests over would leave outputs that no single configuration explains, and
  -- KV blocks that were computed half under each.
  local version, entries = unpack(redis.call('HMGET', key('steering', job.model), 'global_version', 'entries'))
  local prompts = entries and job.prompts or job.asked -- that get receipts
  if READS_RECEIPTS[job.kind] then
    prompts = 0 -- its worker reads the receipts of each unit
  end
  redis.call('HSET', hash, 'expected', prompts * args.ranks, 'everyone', entries and '1' or '0', 'global_version', version or 0)
  -- These are pinned only while the global steering names them; the job may fetch them later.
  for _, name in ipairs(redis.call('SMEMBERS', key('pins', 'global:' .. job.model))) do
    copy_for_job(name)
  end
  local spec, queued = unpack(redis.call('HMGET', hash, 'spec', 'queued'))
  return {'claimed', job.attempt, spec, queued, latched(job), version or '0', entries or '', limits_of(job.tenant).weight or 1}
end

local job = read(id)
if not job then
  return {'unknown'}
end
if job.state ~= 'queued' then
  if job.state == 'running' and redis.call('HGET', hash, 'claim') == args.call then
    return claimed(job) -- a repeat: the connection broke before the reply arrived, so nothing has begun
  end
  return {'refused', job.state}
end
if job.queue ~= (args.queue or '') then -- a message from before the job was handed on
  return {'refused', job.state}
end
if overdue(job) then
  fail(job, 'not_started_in_time', LATE, nil, 'aborted')
  return {'refused', job.state}
end
-- Compared here because every attempt begins here, of all kinds alike. A
-- record without an identity is of a version that had none: it matches no model.
if args.identity == '' or job.identity ~= args.identity then
  refuse_model(job)
  return {'refused', job.state}
end
local desync = redis.call('HGET', DESYNC, worker)
if desync then
  return {'desynced', desync}
end
if args.unreachable ~= '' and redis.call('EXISTS', key('capture', id)) == 1 then
  await_store(job, args.unreachable)
  return {'refused', job.state}
end
if args.crowded and redis.call('HEXISTS', hash, 'side') == 1 then
  redis.call('SREM', turn('sent', job.model, job.line), id) -- the next message of the line takes its place
  shelve(job)
  -- All are due at one moment, and the reaper then sends them by their ids, which is by age: who came first gets the free place.
  look_at_queued(job, (math.floor(now / SHELVED_S) + 1) * SHELVED_S)
  fill(job.model, job.line)
  return {'refused', job.state}
end
if job.shelved then -- this message was sent before
  job.shelved = nil
  redis.call('HDEL', hash, 'shelved')
end
job.attempt = redis.call('HINCRBY', hash, 'attempt', 1)
job.worker = worker
redis.call('HSET', hash, 'worker', worker, 'boot', args.boot, 'claim', args.call, 'lease', now + args.lease_s, 'receipts', 0, 'said', 0)
redis.call('SADD', key('held', worker), id)
look_at(job, now + args.lease_s)
move(job, 'running')
return claimed(job)
