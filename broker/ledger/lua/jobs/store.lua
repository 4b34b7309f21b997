-- Store all outputs of an attempt together. From here on the job waits only for its receipts.
-- args: id, attempt, capture_timeout, outputs (packed), said (how many events the attempt has emitted), last (its last event as JSON,
--       which is still to be emitted, or nil)
-- returns 'unknown' | 'stale' | 'cancelled' (requested meanwhile: the outputs are dropped) | 'behind' (a failover has lost events)
--         | 'running' (receipts are awaited) | 'succeeded'
local id = args.id
local job, why = job_of(id, args.attempt)
if not job then
  return why
end
if job.state == 'cancelling' then
  move(job, 'cancelled')
  return 'cancelled'
end
if job.generated then
  return job.state
end
if tonumber(redis.call('HGET', key('job', id), 'said') or 0) < args.said then
  return 'behind'
end
local deadline = now + args.capture_timeout
job.generated = now
redis.call('SET', key('out', id), args.outputs)
if args.last then
  redis.call('XADD', key('events', id), 'MAXLEN', '~', events_kept(job), '*', 'e', args.last)
end
redis.call('HSET', key('job', id), 'generated', args.at, 'lease', deadline)
look_at(job, deadline)
if not finish(job) then
  changed(job)
end
return job.state
