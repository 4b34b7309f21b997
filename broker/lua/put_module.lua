-- A name points at other content from now on.
-- args: model, name, packed module, packed former ('' for none), whether the content is another ('1' or '0'), number of tensors,
--       then (sha256, bytes or '') per tensor
-- returns {'raced'} (the former is another by now) | {'missing', sha256} | {'stored'}
local model, name, packed, former, other, count = unpack(ARGV, FIRST, FIRST + 5)
local modules = key('modules', model)
local there = redis.call('HGET', modules, name) or ''
if there == packed then -- the same again: its answer was lost
  return {'stored'}
end
if there ~= former then
  return {'raced'}
end
local missing = pin('module:' .. model .. ':' .. name, FIRST + 6, tonumber(count))
if missing then
  return {'missing', missing}
end
redis.call('HSET', modules, name, packed)
redis.call('HSET', key('steering', model), 'module_by:' .. name, VERSION)
if other == '1' then
  redis.call('HINCRBY', key('steering', model), 'version', 1)
end
return {'stored'}
