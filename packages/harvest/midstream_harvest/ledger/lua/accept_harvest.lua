-- Accept a harvest: record, listings and idempotency key in one commit. The key lives as long as the record: until it is deleted.
-- args: id, spec (packed, without the request's lines), lines (packed, or nil), streams (true for a stream, or nil), created (text), tenant, idem (idempotency key, or nil),
--       body (its body's sha256), limits (defaults where the tenant has none of its own), tensors (of its edits: {sha256, false} of
--       each, which a module has)
-- returns {'created', id} | {'repeated', id of the first} | {'mismatch', id of the first} | {'missing', ''} | {'refused', name of the limit, used, allowed, ''}
local id, tenant = args.id, args.tenant
local before = accepted_before(args.idem, args.body, id, 'harvest')
if before then
  return before
end
if redis.call('EXISTS', key('harvest', id)) == 1 then -- a repeat: the client's connection broke before the reply arrived
  return {'created', id}
end
local open, kept = key('harvests-open', tenant), key('harvests', tenant)
local limits = limits_for(tenant)
local refused = closed(tenant)
  or over(limits, 'harvests', redis.call('SCARD', open), 1, 1)
  or over(limits, 'harvests_kept', redis.call('ZCARD', kept), 1, 1)
  or over(limits, 'capture_mib', tonumber(redis.call('HGET', 'ms:usage', tenant .. '/bytes')) or 0, 1, MIB)
if refused then
  return refused
end
if pin('harvest:' .. id, args.tensors) then
  return {'missing', ''} -- its module was changed or deleted since the look-up
end
redis.call('HSET', key('harvest', id), 'spec', args.spec, 'state', 'planning', 'wanted', 'run', 'version', 1, 'tenant', tenant)
if args.lines then
  redis.call('SET', key('harvest-lines', id), args.lines)
end
if args.streams then
  redis.call('HSET', key('harvest', id), 'streams', 1)
end
tally_from_here(key('harvest', id))
redis.call('ZADD', 'ms:harvests', args.created, id)
redis.call('ZADD', kept, args.created, id)
redis.call('SADD', 'ms:harvests-live', id)
redis.call('SADD', open, id)
if args.idem then
  redis.call('HSET', key('harvest', id), 'idem', args.idem)
  redis.call('SET', key('idem', args.idem), id .. ':' .. args.body)
end
return {'created', id}
