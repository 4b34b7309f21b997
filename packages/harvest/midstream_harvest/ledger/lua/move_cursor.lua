-- Move a cursor of a harvest's stream forward: that of a consumer, over units that count, or 'dropped', over units whose shards are
-- deleted. Cursors never go back.
-- args: id, field ('ack:' and the consumer's name, or 'dropped'), cursor; for 'dropped': before (the cursor that it moves from), bytes
-- returns 'gone' | 'ahead' (a unit before the cursor does not count yet) | 'moved'
local id, record, field = args.id, key('harvest', args.id), args.field
local tenant, units, parts, known = unpack(redis.call('HMGET', record, 'tenant', 'units', 'parts', field))
if not tenant then
  return 'gone'
end
local before = tonumber(known) or 0
if field == 'dropped' then
  if before ~= args.before then
    return 'moved' -- another process has deleted the same shards
  end
  local less = 0 - args.bytes -- not -args.bytes: Redis 6.2 and 7.0 take -0 for no integer
  redis.call('HINCRBY', record, 'bytes', less)
  tally(record, tenant, 'bytes', less)
else
  -- A cursor counts units and not shards: a document's rows lie in several shards of a unit, and
  -- trainers want documents.
  if args.cursor > (tonumber(units) or 0) then
    return 'ahead'
  end
  local size = math.ceil((tonumber(units) or 0) / math.max(1, tonumber(parts) or 0))
  for unit = before, args.cursor - 1 do
    local part = string.format('%d', math.floor(unit / size))
    if redis.call('HEXISTS', key('harvest-done', id), part) == 0
      and redis.call('HEXISTS', key('harvest-units', id .. ':' .. part), string.format('%d', unit)) == 0 then
      return 'ahead'
    end
  end
end
if args.cursor > before then
  redis.call('HSET', record, field, string.format('%d', args.cursor))
  redis.call('HINCRBY', record, 'version', 1)
end
return 'moved'
