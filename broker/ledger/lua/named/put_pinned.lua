-- Point the name of an artifact at new content.
-- args: kind (in keys: `plural`), model, name, record (packed), former (as stored; nil: none), changes (how often what applies to all
--       traffic had changed when the record was checked beside it; nil: never), limit (names of a model),
--       tenant (whose name it is; nil: not of a tenant), size (bytes counted towards its limits), limits (defaults where the
--       tenant has none of its own), watching (whether it applies to all traffic), watch_limit,
--       tensors: {sha256, bytes or false} of each
-- returns {'refused', name of the limit, used, allowed, ''} | {'raced'} (the former has changed) | {'full', number} | {'crowded', number} | {'missing', sha256} | {'stored'}
local model, name = args.model, args.name

-- Returns the refusal of the tenant's limits, if any. A replacement needs room only for the difference.
local function refused_by_limits()
  local sizes = key('module-bytes', args.tenant)
  local was, taken = tonumber(redis.call('HGET', sizes, model .. '/' .. name)), 0
  for _, bytes in ipairs(redis.call('HVALS', sizes)) do
    taken = taken + tonumber(bytes)
  end
  local limits = limits_for(args.tenant)
  return over(limits, 'modules', redis.call('HLEN', sizes), was and 0 or 1, 1)
    or over(limits, 'module_mib', taken, args.size - (was or 0), MIB)
end

local names, watching, changes = key(args.kind, model), key(args.kind .. '-watching', model), key('policies-changes', model)
local stored = redis.call('HGET', names, name) or nil
if stored ~= args.record then -- else a repeat: the reply was lost
  if stored ~= args.former or (args.watching and redis.call('GET', changes) ~= (args.changes or false)) then
    return {'raced'}
  end
  local number = redis.call('HLEN', names)
  if not args.tenant and not stored and number >= args.limit then
    return {'full', number}
  end
  local refused = args.tenant and refused_by_limits()
  if refused then
    return refused
  end
  number = redis.call('SCARD', watching)
  if args.watching and redis.call('SISMEMBER', watching, name) == 0 and number >= args.watch_limit then
    return {'crowded', number}
  end
  local missing = pin(args.kind .. ':' .. model .. ':' .. name, args.tensors)
  if missing then
    return {'missing', missing}
  end
  redis.call('HSET', names, name, args.record)
  if args.watching then
    redis.call('INCR', changes)
  end
  redis.call('HSET', key('steering', model), args.kind .. '_by:' .. name, VERSION)
  if args.tenant then
    redis.call('HSET', key('module-bytes', args.tenant), model .. '/' .. name, args.size)
    redis.call('SADD', 'ms:owners', args.tenant)
  end
end
redis.call(args.watching and 'SADD' or 'SREM', watching, name)
return {'stored'}
