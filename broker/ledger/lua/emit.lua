-- An event from the worker, fenced like all its reports.
-- args: id, attempt, number (of the event in the attempt, from 1, ascending), event (JSON)
-- returns 'unknown' | 'stale' | 'emitted'
local id = args.id
local job, why = job_of(id, args.attempt)
if not job then
  return why
end
if args.number <= tonumber(redis.call('HGET', key('job', id), 'said') or 0) then
  return 'emitted' -- emitted before; the reply was lost
end
redis.call('HSET', key('job', id), 'said', args.number)
redis.call('XADD', key('events', id), 'MAXLEN', '~', events_kept(job), '*', 'e', args.event)
redis.call('PUBLISH', key('changed', id), 'e')
return 'emitted'
