-- An event from the worker, fenced like everything it says.
-- args: id, attempt, its number in the attempt (from 1, ascending), event (JSON)
-- returns 'unknown' | 'stale' | 'emitted'
local id, attempt, number, body = unpack(ARGV, FIRST, FIRST + 3)
local job, why = job_of(id, attempt)
if not job then
  return why
end
if tonumber(number) <= tonumber(redis.call('HGET', key('job', id), 'said') or 0) then
  return 'emitted' -- before; its answer was lost
end
redis.call('HSET', key('job', id), 'said', number)
redis.call('XADD', key('events', id), 'MAXLEN', '~', events_kept(job), '*', 'e', body)
redis.call('PUBLISH', key('changed', id), 'e')
return 'emitted'
