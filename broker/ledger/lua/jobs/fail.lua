-- The worker reports that its attempt failed, and why.
-- args: id, attempt, problem (JSON)
-- returns 'unknown' | 'stale' | 'failed'
local job, why = job_of(args.id, args.attempt)
if not job then
  return why
end
redis.call('HSET', key('job', args.id), 'error', args.problem)
move(job, 'failed')
return 'failed'
