-- Change the record of a harvest that has not ended: what its user wants, what it shows, a part under way, its end. Cancelling is final.
-- args: id; one of
--       ask ('run', 'pause' or 'cancel')
--       finish (the state that it ends in), error (JSON, or nil)
--       wanted (the change is made only while this is wanted), set and once (field -> value; `once`: only fields without one), part and out
--       (number and JSON of a part whose job was submitted, or nil)
-- returns 'gone' | 'over' | 'cancelling' | 'sealing' | 'unwanted' | 'changed'
local id, record = args.id, key('harvest', args.id)
local finished, wanted, tenant, parts, closing = unpack(redis.call('HMGET', record, 'finished', 'wanted', 'tenant', 'parts', 'closing'))
if not tenant or finished then
  redis.call('SREM', 'ms:harvests-live', id)
  return tenant and 'over' or 'gone'
end
local cancelled = wanted == 'cancel'
if args.ask then
  if cancelled and args.ask ~= 'cancel' then
    return 'cancelling'
  -- A seal sets `closing` before it writes the manifest, so a cancelled harvest never has one.
  elseif closing and args.ask ~= 'run' then
    return 'sealing' -- its manifest may exist already
  end
  redis.call('HSET', record, 'wanted', args.ask)
elseif args.finish then
  redis.call('HSET', record, 'state', cancelled and 'cancelled' or args.finish, 'finished', args.at, 'reason', '')
  redis.call('HDEL', record, 'trouble')
  if args.error and not cancelled then
    redis.call('HSET', record, 'error', args.error)
  end
  for part = 0, (tonumber(parts) or 0) - 1 do
    if redis.call('HEXISTS', key('harvest-done', id), part) == 0 then
      redis.call('DEL', key('harvest-units', id .. ':' .. part))
    end
  end
  redis.call('DEL', key('harvest-lines', id), key('harvest-out', id), key('harvest-begun', id))
  if redis.call('HEXISTS', record, 'streams') == 0 then -- a stream's consumers read them
    redis.call('EXPIRE', key('harvest-done', id), 2 * args.result_ttl) -- a seal may be run again
  end
  pin('harvest:' .. id, {})
  redis.call('SREM', 'ms:harvests-live', id)
  redis.call('SREM', key('harvests-open', tenant), id)
elseif wanted ~= args.wanted then
  return 'unwanted'
else
  for name, value in pairs(args.set) do
    redis.call('HSET', record, name, value)
  end
  for name, value in pairs(args.once) do
    redis.call('HSETNX', record, name, value)
  end
  if args.part then
    redis.call('HSET', key('harvest-out', id), args.part, args.out)
    if args.part >= 0 then
      redis.call('SADD', key('harvest-begun', id), args.part)
    end
  end
end
redis.call('HINCRBY', record, 'version', 1)
return 'changed'
