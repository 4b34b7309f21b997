-- Remove the record of a harvest that is over and whose files are deleted.
-- args: id
local id = args.id
local tenant, bytes = unpack(redis.call('HMGET', key('harvest', id), 'tenant', 'bytes'))
if tenant then
  tally(key('harvest', id), tenant, 'bytes', -(tonumber(bytes) or 0))
end
redis.call('DEL', key('harvest', id), key('harvest-out', id), key('harvest-done', id))
redis.call('ZREM', 'ms:harvests', id)
