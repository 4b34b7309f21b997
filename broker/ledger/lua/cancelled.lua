-- The worker says that a cancelled job has left its engine.
-- args: id, attempt
-- returns 'unknown' | 'stale' (also: nobody asked for it) | 'cancelled'
local id, attempt = unpack(ARGV, FIRST, FIRST + 1)
local job = read(id)
if not job then
  return 'unknown'
end
if not (working(job, attempt) and job.state == 'cancelling') then
  return 'stale'
end
move(job, 'cancelled')
return 'cancelled'
