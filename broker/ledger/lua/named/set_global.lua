-- Make the entries of a check, which the ranks have passed, the global steering of its model.
-- args: model, check (its id), tensors (hashes of those that the entries name), steers (whether there are entries)
-- returns {'gone'} (the check has expired) | {'missing', sha256} | {'set', version, time of the change}
local state, asked = key('steering', args.model), key('steering-check', args.check)
local last, version, changed = unpack(redis.call('HMGET', state, 'check', 'global_version', 'changed'))
if last == args.check then -- a repeat: the reply was lost
  return {'set', version, changed}
end
local entries = redis.call('HGET', asked, 'entries')
if not entries then
  return {'gone'}
end
local tensors = {}
for place, name in ipairs(args.tensors) do
  tensors[place] = {name, redis.call('HGET', asked, name)}
end
local missing = pin('global:' .. args.model, tensors)
if missing then
  return {'missing', missing}
end
version = redis.call('HINCRBY', state, 'global_version', 1)
redis.call('HSET', state, 'changed', args.at, 'check', args.check, 'current_by', VERSION)
if args.steers then
  redis.call('HSET', state, 'entries', entries)
else
  redis.call('HDEL', state, 'entries')
end
return {'set', version, args.at}
