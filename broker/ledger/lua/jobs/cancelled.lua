-- The worker reports that a cancelled job has left its engine.
-- args: id, attempt
-- returns 'unknown' | 'stale' (also: no cancellation was requested) | 'cancelled'
local job = read(args.id)
if not job then
  return 'unknown'
end
if not (working(job, args.attempt) and job.state == 'cancelling') then
  return 'stale'
end
move(job, 'cancelled')
return 'cancelled'
