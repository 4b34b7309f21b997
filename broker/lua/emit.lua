-- An event from the worker, fenced like everything it says.
-- args: id, attempt, event (JSON)
-- returns 'unknown' | 'stale' | 'emitted'
local id, attempt, body = unpack(ARGV, FIRST, FIRST + 2)
local job, why = job_of(id, attempt)
if not job then
  return why
end
redis.call('XADD', key('events', id), 'MAXLEN', '~', events_kept(job), '*', 'e', body)
redis.call('PUBLISH', key('changed', id), 'e')
return 'emitted'
