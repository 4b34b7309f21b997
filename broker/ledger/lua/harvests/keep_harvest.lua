-- Record what a part of a harvest reports, if its attempt is current: a unit whose shards are durable, which counts once; that the
-- part is done; fields of the record; or a survey. Only a survey is recorded once the harvest has ended, and nothing once it is deleted
-- or being cancelled.
-- args: id, attempt (of the part's job), harvest, part, unit (its number), survey (whether it is one), record (packed unit; the survey
--       as JSON; otherwise the done part's file as JSON), set (field -> value), clear (fields), counts (name -> what to add),
--       requests (whose receipts were read), ranks, stages
-- returns 'unknown' | 'stale' | 'cancelling' | 'kept'
local id, record = args.id, key('harvest', args.harvest)
local job, why = job_of(id, args.attempt)
if not job then
  return why
end
local state, wanted, tenant = unpack(redis.call('HMGET', record, 'state', 'wanted', 'tenant'))
if not state or (OVER[state] and not args.survey) or wanted == 'cancel' then
  move(job, 'cancelling') -- no other attempt follows
end
if job.state == 'cancelling' then
  return 'cancelling'
end
local units = key('harvest-units', args.harvest .. ':' .. args.part)
local new = false
if args.unit then
  new = redis.call('HSETNX', units, args.unit, args.record) == 1
  for _, request in ipairs(args.requests) do
    for rank = 0, args.ranks - 1 do
      redis.call('HDEL', key('ticket', id), request .. '/' .. rank)
    end
    for stage = 0, args.stages - 1 do
      redis.call('HDEL', key('agree', id), request .. '/' .. stage, request .. '/' .. stage .. '/read')
    end
  end
elseif args.survey then
  new = redis.call('HSETNX', key('harvest-surveys', args.harvest), id, args.record) == 1
  redis.call('SREM', key('harvest-surveying', args.harvest), id)
elseif args.record then
  new = redis.call('HSETNX', key('harvest-done', args.harvest), args.part, args.record) == 1
  -- The part's manifest has them now: Redis holds only the units of parts under way.
  redis.call('DEL', units)
end
if new then
  for name, more in pairs(args.counts) do
    redis.call('HINCRBY', record, name, more)
  end
  tally(record, tenant, 'bytes', args.counts.bytes or 0)
  redis.call('HDEL', record, 'trouble')
end
for name, value in pairs(args.set) do
  redis.call('HSET', record, name, value)
end
for _, name in ipairs(args.clear) do
  redis.call('HDEL', record, name)
end
redis.call('HINCRBY', record, 'version', 1)
return 'kept'
