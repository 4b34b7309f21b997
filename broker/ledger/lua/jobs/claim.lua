-- queued -> running: the returned attempt is the worker's fencing token.
-- args: id, worker, boot, ranks, lease_s, global_version (of the global steering that the worker has applied), everyone (whether it
--       has entries: then every prompt gets receipts, not only those that the job edits or captures), call (random id of this call),
--       unreachable (why the worker's artifact store is unavailable; empty: it is not), identity (of the worker's model),
--       on_model_change ('fail' or 'wait'), queue (that the worker serves), crowded (whether it holds as many surveys
--       as it may: the job, if it is a survey, is sent again after a while)
-- returns {'unknown'} | {'refused', state} | {'desynced', reason} | {'behind', desired version}
--         | {'claimed', attempt, spec, time of queueing, latches of its conversation: {policy, job that set it, ...}}
local id, worker = args.id, args.worker
local job = read(id)
if not job then
  return {'unknown'}
end
if job.state ~= 'queued' then
  local call, spec, queued = unpack(redis.call('HMGET', key('job', id), 'claim', 'spec', 'queued'))
  if job.state == 'running' and call == args.call then -- a repeat: the connection broke before the reply arrived
    return {'claimed', job.attempt, spec, queued, latched(job)}
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
if args.identity == '' or job.identity ~= args.identity then
  refuse_model(job)
  return {'refused', job.state}
end
local desync = redis.call('HGET', DESYNC, worker)
if desync then
  return {'desynced', desync}
end
local desired = redis.call('HGET', key('steering', job.model), 'global_version') or '0'
if tonumber(desired) ~= args.global_version then
  return {'behind', desired}
end
if args.unreachable ~= '' and redis.call('EXISTS', key('capture', id)) == 1 then
  await_store(job, args.unreachable)
  return {'refused', job.state}
end
local hash = key('job', id)
if args.crowded and redis.call('HEXISTS', hash, 'survey') == 1 then
  redis.call('SREM', turn('sent', job.model, job.line), id) -- the next message of the line takes its place
  shelve(job)
  fill(job.model, job.line)
  return {'refused', job.state}
end
if job.shelved then -- this message was sent before
  job.shelved = nil
  redis.call('HDEL', hash, 'shelved')
end
job.attempt = redis.call('HINCRBY', hash, 'attempt', 1)
job.worker = worker
local prompts = args.everyone and job.prompts or job.asked -- that get receipts
if READS_RECEIPTS[job.kind] then
  prompts = 0 -- its worker reads the receipts of each unit
end
redis.call('HSET', hash, 'worker', worker, 'boot', args.boot, 'claim', args.call, 'lease', now + args.lease_s, 'receipts', 0,
  'said', 0, 'expected', prompts * args.ranks, 'everyone', args.everyone and '1' or '0', 'global_version', args.global_version)
redis.call('SADD', key('held', worker), id)
look_at(job, now + args.lease_s)
move(job, 'running')
local spec, queued = unpack(redis.call('HMGET', hash, 'spec', 'queued'))
return {'claimed', job.attempt, spec, queued, latched(job)}
