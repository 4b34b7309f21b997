-- The worker gives an attempt up because its ranks are out of step: another attempt, once, or none (setting on_desync).
-- args: id, attempt, why
-- returns 'unknown' | 'stale' | the state after it
local id, attempt, detail = unpack(ARGV, FIRST, FIRST + 2)
local job, why = job_of(id, attempt)
if not job then
  return why
end
put_back_desynced(job, detail)
return job.state
