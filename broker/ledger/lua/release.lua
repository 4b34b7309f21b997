-- A worker gives a running job back, so that another attempt can be made immediately.
-- args: id, attempt, away (why the artifact store is unavailable: the job waits for it; empty: it is not)
-- returns 'unknown' | 'stale' | the new state
local job, why = job_of(args.id, args.attempt)
if not job then
  return why
end
if args.away ~= '' and job.state == 'running' then
  await_store(job, args.away)
else
  put_back(job)
end
return job.state
