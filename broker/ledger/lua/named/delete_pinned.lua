-- Delete the name of an artifact, and its tensors unless others need them.
-- args: kind, model, name, tenant, as in `put_pinned`
-- returns whether there was one, 1 or 0
local model, name = args.model, args.name
redis.call('SREM', key(args.kind .. '-watching', model), name)
redis.call('HDEL', key('steering', model), args.kind .. '_by:' .. name)
if args.tenant then
  redis.call('HDEL', key('module-bytes', args.tenant), model .. '/' .. name)
end
if args.kind == 'policies' then
  redis.call('DEL', key('policy-days', model .. ':' .. name))
  drop_hits(model .. ':' .. name)
end
pin(args.kind .. ':' .. model .. ':' .. name, {})
return redis.call('HDEL', key(args.kind, model), name)
