-- A worker gives a running job back, so that another attempt can be made immediately.
-- args: id, attempt, unreachable (why the artifact store is unavailable: the job waits for it; empty: it is not), later (the attempt
--       was not begun: the job is sent again after a while), stopped (the worker was told to stop: the attempt does not count)
-- returns 'unknown' | 'stale' | the new state
local job, why = job_of(args.id, args.attempt)
if not job then
  return why
end
if args.unreachable ~= '' and job.state == 'running' then
  await_store(job, args.unreachable)
elseif (args.later or args.stopped) and job.state == 'running' then
  redis.call('HINCRBY', key('job', job.id), 'excused', 1)
  if args.later then
    job.shelved = '1'
  end
  requeue(job, 'worker ' .. job.worker .. (args.later and ' was busy' or ' was stopped'))
else
  put_back(job, 'worker ' .. job.worker .. ' stopped before it was done')
end
return job.state
