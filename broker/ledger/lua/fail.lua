-- The worker says that its attempt failed, and why.
-- args: id, attempt, problem (JSON)
-- returns 'unknown' | 'stale' | 'failed'
local id, attempt, problem = unpack(ARGV, FIRST, FIRST + 2)
local job, why = job_of(id, attempt)
if not job then
  return why
end
redis.call('HSET', key('job', id), 'error', problem)
move(job, 'failed')
return 'failed'
