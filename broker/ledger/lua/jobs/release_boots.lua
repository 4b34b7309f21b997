-- A worker has started: requeue the jobs that its former starts held.
-- args: worker, boot (of this start)
-- returns {id, new state, ...} of the affected jobs
local worker = args.worker
local touched = {}
redis.call('HDEL', DESYNC, worker) -- its ranks have restarted
redis.call('HDEL', SETTLED, worker)
for _, id in ipairs(redis.call('SMEMBERS', key('held', worker))) do
  local job = read(id)
  if job and working(job, job.attempt) and job.worker == worker then
    if job.boot ~= args.boot then
      put_back(job, 'worker ' .. worker .. ' was restarted')
      touched[#touched + 1] = id
      touched[#touched + 1] = job.state
    end
  else
    redis.call('SREM', key('held', worker), id)
  end
end
return touched
