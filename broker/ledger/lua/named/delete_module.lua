-- Delete a module's name.
-- args: model, name, tenant
-- returns the packed module that it pointed at, '' if there was none
local model, name = args.model, args.name
local modules = key('modules', model)
local packed = redis.call('HGET', modules, name)
if not packed then
  return ''
end
redis.call('HDEL', modules, name)
redis.call('HDEL', key('steering', model), 'module_by:' .. name)
redis.call('HDEL', key('module-bytes', args.tenant), model .. '/' .. name)
pin('module:' .. model .. ':' .. name, {})
return packed
