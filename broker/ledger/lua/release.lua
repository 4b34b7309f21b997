-- A worker gives a running job back, so that another attempt can be made immediately.
-- args: id, attempt
-- returns 'unknown' | 'stale' | the new state
local job, why = job_of(args.id, args.attempt)
if not job then
  return why
end
put_back(job)
return job.state
