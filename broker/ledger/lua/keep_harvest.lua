-- Record a unit of a harvest, or that a part is done, for an attempt that is current. A unit's shards are durable by now, and count once.
-- args: id, attempt (of the part's job), harvest, part, unit (its number; false: the part is done), record (packed unit, or the part's
--       file as JSON), counts (name -> what to add), requests (whose receipts were read), ranks, stages
-- returns 'unknown' | 'stale' | 'cancelling' | 'kept'
local id, record = args.id, key('harvest', args.harvest)
local job, why = job_of(id, args.attempt)
if not job or redis.call('EXISTS', record) == 0 then
  return job and 'unknown' or why
end
if job.state == 'cancelling' then
  return 'cancelling'
end
local units = key('harvest-units', args.harvest .. ':' .. args.part)
local new
if args.unit then
  new = redis.call('HSETNX', units, args.unit, args.record) == 1
  for _, request in ipairs(args.requests) do
    for rank = 0, args.ranks - 1 do
      redis.call('HDEL', key('ticket', id), request .. '/' .. rank)
    end
    for stage = 0, args.stages - 1 do
      redis.call('HDEL', key('agree', id), request .. '/' .. stage)
    end
  end
else
  new = redis.call('HSETNX', key('harvest-done', args.harvest), args.part, args.record) == 1
  redis.call('DEL', units)
end
if new then
  for name, more in pairs(args.counts) do
    redis.call('HINCRBY', record, name, more)
  end
  tally(record, redis.call('HGET', record, 'tenant'), 'bytes', args.counts.bytes or 0)
  redis.call('HDEL', record, 'trouble')
  redis.call('HINCRBY', record, 'version', 1)
end
return 'kept'
