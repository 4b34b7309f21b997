-- The worker abandons an attempt because its ranks are out of step: one more attempt, or none (setting on_desync).
-- args: id, attempt, detail
-- returns 'unknown' | 'stale' | the new state
local job, why = job_of(args.id, args.attempt)
if not job then
  return why
end
put_back_desynced(job, args.detail)
return job.state
