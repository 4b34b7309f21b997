-- The worker says that its attempt failed, and why.
-- args: id, attempt, problem (JSON)
-- returns 'unknown' | 'stale' | 'failed'
local id, attempt, problem = unpack(ARGV, FIRST, FIRST + 2)
local job = read(id)
if not job then
  return 'unknown'
end
if not working(job, attempt) then
  return 'stale'
end
redis.call('HSET', key('job', id), 'error', problem)
move(job, 'failed')
return 'failed'
