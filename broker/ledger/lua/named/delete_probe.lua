-- Delete a probe's name, and its tensors unless others need them.
-- args: model, name
-- returns whether there was one, 1 or 0
local model, name = args.model, args.name
redis.call('SREM', key('probes-watching', model), name)
pin('probe:' .. model .. ':' .. name, {})
return redis.call('HDEL', key('probes', model), name)
