-- Delete the name of a source run.
-- args: model, name, job (which the caller expects it to point at)
-- returns 1, or 0 if it points at another job or does not exist
local packed = redis.call('HGET', key('runs', args.model), args.name)
if not packed or cmsgpack.unpack(packed).job ~= args.job then
  return 0
end
return redis.call('HDEL', key('runs', args.model), args.name)
