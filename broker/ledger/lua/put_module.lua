-- A name points at other content from now on.
-- args: model, name, packed module, packed former ('' for none), whether the content is another ('1' or '0'), tenant, bytes that it
--       counts with, JSON of the limits that hold where the tenant has none of its own, number of tensors, then (sha256, bytes or '')
--       per tensor
-- returns {'raced'} (the former is another by now) | {'refused', name of the limit, what is used, what is allowed, ''}
--         | {'missing', sha256} | {'stored'}
local model, name, packed, former, other, tenant, size, defaults, count = unpack(ARGV, FIRST, FIRST + 8)
local modules = key('modules', model)
local there = redis.call('HGET', modules, name) or ''
if there == packed then -- the same again: its answer was lost
  return {'stored'}
end
if there ~= former then
  return {'raced'}
end
-- How large each is, of one tenant: what replaces another needs room for what it has more.
local sizes, place = key('module-bytes', tenant), model .. '/' .. name
local was, taken = tonumber(redis.call('HGET', sizes, place)), 0
for _, bytes in ipairs(redis.call('HVALS', sizes)) do
  taken = taken + tonumber(bytes)
end
local limits = limits_for(tenant, defaults)
local refused = over(limits, 'modules', redis.call('HLEN', sizes), was and 0 or 1, 1)
  or over(limits, 'module_mib', taken, size - (was or 0), MIB)
if refused then
  return refused
end
local missing = pin('module:' .. model .. ':' .. name, FIRST + 9, tonumber(count))
if missing then
  return {'missing', missing}
end
redis.call('HSET', modules, name, packed)
redis.call('HSET', key('steering', model), 'module_by:' .. name, VERSION)
redis.call('HSET', sizes, place, size)
redis.call('SADD', 'ms:owners', tenant)
if other == '1' then
  redis.call('HINCRBY', key('steering', model), 'version', 1)
end
return {'stored'}
