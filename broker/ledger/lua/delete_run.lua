-- A name of a source run is taken away.
-- args: model, name, job (that the caller believes it points at)
-- returns 1, or 0 when it points at another job, or at none
local packed = redis.call('HGET', key('runs', args.model), args.name)
if not packed or cmsgpack.unpack(packed).job ~= args.job then
  return 0
end
return redis.call('HDEL', key('runs', args.model), args.name)
