-- queued -> running: the attempt that comes back is the worker's fencing token.
-- args: id, worker, boot, ranks, lease_s
-- returns {'unknown'} | {'refused', state} | {'claimed', attempt, spec}
local id, worker, boot, ranks, lease_s = unpack(ARGV, FIRST, FIRST + 4)
local job = read(id)
if not job then
  return {'unknown'}
end
if job.state ~= 'queued' then
  return {'refused', job.state}
end
local hash = key('job', id)
job.attempt = redis.call('HINCRBY', hash, 'attempt', 1)
job.worker = worker
redis.call('HSET', hash, 'worker', worker, 'boot', boot, 'lease', now + tonumber(lease_s), 'receipts', 0, 'expected', job.asked * tonumber(ranks))
redis.call('SADD', key('held', worker), id)
look_at(job, now + tonumber(lease_s))
move(job, 'running')
return {'claimed', job.attempt, redis.call('HGET', hash, 'spec')}
