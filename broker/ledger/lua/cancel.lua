-- A user asks for the end of a job.
-- args: id
-- returns {'unknown'} | {'refused', state} | {state after it}
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
    move(job, 'cancelled') -- nothing runs any more that could be stopped; only receipts were awaited
  end
end
return {job.state}
