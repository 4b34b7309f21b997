-- A worker has done its part of a running job: workers of another queue of the model continue it. The attempt does not count.
-- args: id, attempt, queue (that the job goes to), cells (how many will be computed exactly)
-- returns 'unknown' | 'stale' | 'cancelling' (cancellation was requested: not handed on) | 'handed_on'
local job = read(args.id)
if not job then
  return 'unknown'
end
if job.queue == args.queue and job.attempt >= args.attempt then -- a repeat: the connection broke before the reply arrived
  return 'handed_on'
end
if not working(job, args.attempt) then
  return 'stale'
end
if job.state == 'cancelling' then
  return 'cancelling'
end
tally_cells(job, args.cells - job.cells_expected)
job.queue, job.cells_expected, job.handed_on = args.queue, args.cells, true
job.line = job.queue == '' and job.step or job.step .. '.' .. job.queue
redis.call('HSET', key('job', job.id), 'queue', job.queue, 'cells_expected', job.cells_expected)
redis.call('HINCRBY', key('job', job.id), 'excused', 1)
-- It waits for its turn there: the jobs of a tenant with many attributions do not overtake others.
move(job, 'queued')
return 'handed_on'
