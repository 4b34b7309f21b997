-- Delete the name of a probe or a policy, and its tensors unless others need them.
-- args: kind, model, name, as in `put_pinned`
-- returns whether there was one, 1 or 0
local model, name = args.model, args.name
redis.call('SREM', key(args.kind .. '-watching', model), name)
pin(args.kind .. ':' .. model .. ':' .. name, {})
return redis.call('HDEL', key(args.kind, model), name)
