-- Point a probe's name at new content.
-- args: model, name, probe (packed), former (as stored; nil: none), limit (probes of a model), watching (whether it scores all
--       traffic), watch_limit, tensors: {sha256, bytes or false} of each
-- returns {'raced'} (the former has changed) | {'full', number} | {'crowded', number} | {'missing', sha256} | {'stored'}
local model, name = args.model, args.name
local probes, watching = key('probes', model), key('probes-watching', model)
local stored = redis.call('HGET', probes, name) or nil
if stored ~= args.probe then -- else a repeat: the reply was lost
  if stored ~= args.former then
    return {'raced'}
  end
  local number = redis.call('HLEN', probes)
  if not stored and number >= args.limit then
    return {'full', number}
  end
  number = redis.call('SCARD', watching)
  if args.watching and redis.call('SISMEMBER', watching, name) == 0 and number >= args.watch_limit then
    return {'crowded', number}
  end
  local missing = pin('probe:' .. model .. ':' .. name, args.tensors)
  if missing then
    return {'missing', missing}
  end
  redis.call('HSET', probes, name, args.probe)
end
redis.call(args.watching and 'SADD' or 'SREM', watching, name)
return {'stored'}
