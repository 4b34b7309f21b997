-- The outputs of an attempt, all at once. From here on the job waits for its receipts alone.
-- args: id, attempt, capture_timeout_s, outputs, the event of the last of them (JSON), '' for none
-- returns 'unknown' | 'stale' | 'cancelled' (asked for meanwhile: the outputs are dropped) | 'running' (receipts are awaited) | 'succeeded'
local id, attempt, capture_timeout, outputs, last = unpack(ARGV, FIRST, FIRST + 4)
local job, why = job_of(id, attempt)
if not job then
  return why
end
if job.state == 'cancelling' then
  move(job, 'cancelled')
  return 'cancelled'
end
if job.generated then
  return job.state
end
local deadline = now + tonumber(capture_timeout)
job.generated = now
redis.call('SET', key('out', id), outputs)
if last ~= '' then
  redis.call('XADD', key('events', id), 'MAXLEN', '~', events_kept(job), '*', 'e', last)
end
redis.call('HSET', key('job', id), 'generated', ARGV[1], 'lease', deadline)
look_at(job, deadline)
if not finish(job) then
  changed(job)
end
return job.state
