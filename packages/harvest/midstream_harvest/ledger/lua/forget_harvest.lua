-- Remove the record of a harvest that is over and whose files are deleted, and its idempotency key.
-- args: id
local id = args.id
local tenant, bytes, idem = unpack(redis.call('HMGET', key('harvest', id), 'tenant', 'bytes', 'idem'))
if tenant then
  tally(key('harvest', id), tenant, 'bytes', -(tonumber(bytes) or 0))
  redis.call('ZREM', key('harvests', tenant), id)
end
if idem and string.find(redis.call('GET', key('idem', idem)) or '', id .. ':', 1, true) == 1 then
  redis.call('DEL', key('idem', idem))
end
redis.call('DEL', key('harvest', id), key('harvest-lines', id), key('harvest-out', id), key('harvest-done', id), key('harvest-surveys', id),
  key('harvest-surveying', id))
redis.call('ZREM', 'ms:harvests', id)
