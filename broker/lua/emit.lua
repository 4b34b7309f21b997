-- An event from the worker, fenced like everything it says.
-- args: id, attempt, event (JSON)
-- returns 'unknown' | 'stale' | 'emitted'
local id, attempt, body = unpack(ARGV, FIRST, FIRST + 2)
local job = read(id)
if not job then
  return 'unknown'
end
if not working(job, attempt) then
  return 'stale'
end
redis.call('XADD', key('events', id), 'MAXLEN', '~', events_kept(job), '*', 'e', body)
redis.call('PUBLISH', key('changed', id), 'e')
return 'emitted'
