-- Check one job that is due for the reaper.
-- args: id, capture_timeout, lease_s, up_since (when Redis started: while it was down no lease could be renewed and no receipt settled),
--       relay_since (since when a relay has been alive; the present time while none is: no receipt can arrive)
-- returns {finding or action, model, attempt, queue}:
--   gone | held (not due after all) | queued (look for its message) | late (aborted) | requeued | failed | timed_out | cancelled
local id, capture_timeout = args.id, args.capture_timeout
local job = read(id)
if not job or TERMINAL[job.state] then
  redis.call('ZREM', 'ms:live', id)
  return {'gone'}
end
local function answer(what)
  return {what, job.model, job.attempt, job.queue}
end
if job.state == 'queued' then
  if overdue(job) then
    fail(job, 'not_started_in_time', LATE, nil, 'aborted')
    return answer('late')
  end
  if redis.call('ZSCORE', turn('wait', job.model, job.line, job.tenant), id) then
    look_at_queued(job, math.huge)
    return answer('held')
  end
  if job.shelved then
    redis.call('HDEL', key('job', id), 'shelved')
    send(job)
    return answer('held')
  end
  redis.call('SADD', turn('sent', job.model, job.line), id) -- including jobs accepted before windows existed
  return answer('queued')
end
local grace = args.lease_s
if job.generated then
  grace = math.min(grace, capture_timeout)
end
local deadline = math.max(job.lease, args.up_since + grace)
if job.generated then
  deadline = math.max(deadline, args.relay_since + capture_timeout)
end
if deadline > now then
  look_at(job, deadline)
  return answer('held')
end
if job.generated and job.state == 'running' then
  -- A worker known to be gone sends no more receipts: try again. Otherwise the receipts are late: report that.
  local known = redis.call('HEXISTS', 'ms:workers', job.worker) == 1
  if not known or redis.call('GET', key('alive', job.worker)) == job.boot then
    fail(job, 'receipts_timed_out', job.receipts .. ' of ' .. job.expected .. ' receipts arrived within ' .. capture_timeout
      .. ' s of the last output', 'timed_out')
    return answer('timed_out')
  end
end
put_back(job, 'worker ' .. job.worker .. ' did not renew its lease')
return answer(job.state == 'queued' and 'requeued' or job.state)
