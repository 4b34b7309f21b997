-- Point a module's name at new content.
-- args: model, name, module (packed), former (as stored; nil: none), tenant, size (bytes counted towards the limits),
--       limits (defaults where the tenant has none of its own), tensors: {sha256, bytes or false} of each
-- returns {'raced'} (the former has changed) | {'refused', name of the limit, used, allowed, ''}
--         | {'missing', sha256} | {'stored'}
local model, name, tenant, size = args.model, args.name, args.tenant, args.size
local modules = key('modules', model)
local stored = redis.call('HGET', modules, name) or nil
if stored == args.module then -- a repeat: the reply was lost
  return {'stored'}
end
if stored ~= args.former then
  return {'raced'}
end
-- Sizes of one tenant's modules: a replacement needs room only for the difference.
local sizes, place = key('module-bytes', tenant), model .. '/' .. name
local was, taken = tonumber(redis.call('HGET', sizes, place)), 0
for _, bytes in ipairs(redis.call('HVALS', sizes)) do
  taken = taken + tonumber(bytes)
end
local limits = limits_for(tenant)
local refused = over(limits, 'modules', redis.call('HLEN', sizes), was and 0 or 1, 1)
  or over(limits, 'module_mib', taken, size - (was or 0), MIB)
if refused then
  return refused
end
local missing = pin('module:' .. model .. ':' .. name, args.tensors)
if missing then
  return {'missing', missing}
end
redis.call('HSET', modules, name, args.module)
redis.call('HSET', key('steering', model), 'module_by:' .. name, VERSION)
redis.call('HSET', sizes, place, size)
redis.call('SADD', 'ms:owners', tenant)
return {'stored'}
