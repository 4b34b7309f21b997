-- Point the name of a probe or a policy at new content.
-- args: kind (in keys: probes or policies), model, name, record (packed), former (as stored; nil: none), limit
--       (names of a model), watching (whether it applies to all traffic), watch_limit, tensors: {sha256, bytes or false} of each
-- returns {'raced'} (the former has changed) | {'full', number} | {'crowded', number} | {'missing', sha256} | {'stored'}
local model, name = args.model, args.name
local names, watching = key(args.kind, model), key(args.kind .. '-watching', model)
local stored = redis.call('HGET', names, name) or nil
if stored ~= args.record then -- else a repeat: the reply was lost
  if stored ~= args.former then
    return {'raced'}
  end
  local number = redis.call('HLEN', names)
  if not stored and number >= args.limit then
    return {'full', number}
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
end
redis.call(args.watching and 'SADD' or 'SREM', watching, name)
return {'stored'}
