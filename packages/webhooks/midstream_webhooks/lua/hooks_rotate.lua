-- Create a new signing secret; the former one also signs for a while.
-- args: owner (of the secrets), secret (the new one), ends (until when the former one signs), inherit_from (whose secret becomes the former
--       one if `owner` has none yet), keep (true: leave an existing one as it is)
-- returns {secret, created, former or '', its creation, its end}
local hash = 'ms:hook-secret:' .. args.owner
if not (args.keep and redis.call('EXISTS', hash) == 1) then
  local former = redis.call('HMGET', hash, 'secret', 'created')
  if not former[1] and args.inherit_from then
    former = redis.call('HMGET', 'ms:hook-secret:' .. args.inherit_from, 'secret', 'created')
  end
  redis.call('DEL', hash)
  redis.call('HSET', hash, 'secret', args.secret, 'created', args.at)
  if former[1] then
    redis.call('HSET', hash, 'former', former[1], 'former_created', former[2], 'former_until', args.ends)
  end
end
return redis.call('HMGET', hash, 'secret', 'created', 'former', 'former_created', 'former_until')
