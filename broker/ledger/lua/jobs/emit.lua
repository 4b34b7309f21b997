-- An event from the worker, fenced like all its reports.
-- args: id, attempt, number (of the event in the attempt, from 1, ascending), event (JSON)
-- returns 'unknown' | 'stale' | 'behind' (the event before it is missing: a failover lost it) | 'emitted'
local id = args.id
local job, why = job_of(id, args.attempt)
if not job then
  return why
end
local said = tonumber(redis.call('HGET', key('job', id), 'said') or 0)
if args.number <= said then
  return 'emitted' -- emitted before; the reply was lost
end
-- Events are numbered because none waits for replicas. An attempt with a hole is given up, so that
-- a reader sees a stream that starts again and never one with a gap.
if args.number > said + 1 then
  return 'behind'
end
redis.call('HSET', key('job', id), 'said', args.number)
redis.call('XADD', key('events', id), 'MAXLEN', '~', events_kept(job), '*', 'e', args.event)
redis.call('PUBLISH', key('changed', id), 'e')
return 'emitted'
