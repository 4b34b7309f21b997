-- Cancel a job at its user's request.
-- args: id
-- returns {'unknown'} | {'refused', state} | {new state}
local job = read(args.id)
if not job then
  return {'unknown'}
end
if TERMINAL[job.state] then
  return {'refused', job.state}
end
if job.state == 'queued' then
  move(job, 'aborted')
elseif job.state == 'running' then
  move(job, 'cancelling')
  if job.generated then
    move(job, 'cancelled') -- nothing is running; only receipts were awaited
  end
end
return {job.state}
