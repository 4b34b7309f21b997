-- The worker gives an attempt up because its ranks are out of step: another attempt, once, or none (setting on_desync).
-- args: id, attempt, detail
-- returns 'unknown' | 'stale' | the state after it
local job, why = job_of(args.id, args.attempt)
if not job then
  return why
end
put_back_desynced(job, args.detail)
return job.state
