-- A name of a source run is taken away.
-- args: model, name, id of the job that the caller believes it points at
-- returns 1, or 0 when it points at another job, or at none
local model, name, id = unpack(ARGV, FIRST, FIRST + 2)
local packed = redis.call('HGET', key('runs', model), name)
if not packed or cmsgpack.unpack(packed).job ~= id then
  return 0
end
return redis.call('HDEL', key('runs', model), name)
