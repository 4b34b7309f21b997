-- A name is taken away.
-- args: model, name
-- returns the packed module that it pointed at, '' when there was none
local model, name = unpack(ARGV, FIRST, FIRST + 1)
local modules = key('modules', model)
local packed = redis.call('HGET', modules, name)
if not packed then
  return ''
end
redis.call('HDEL', modules, name)
redis.call('HDEL', key('steering', model), 'module_by:' .. name)
pin('module:' .. model .. ':' .. name, 0, 0)
redis.call('HINCRBY', key('steering', model), 'version', 1)
return packed
