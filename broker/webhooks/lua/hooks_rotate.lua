-- Create a new signing secret; the former one also signs for a while.
-- args: owner (of the secrets), secret (the new one), ends (until when the former one signs), heir_of (owner of the former one if this
--       has none yet), keep (true: leave an existing one as it is)
-- returns {secret, created, former or '', its creation, its end}
local mine = 'ms:hook-secret:' .. args.owner
if not (args.keep and redis.call('EXISTS', mine) == 1) then
  local former = redis.call('HMGET', mine, 'secret', 'created')
  if not former[1] and args.heir_of then
    former = redis.call('HMGET', 'ms:hook-secret:' .. args.heir_of, 'secret', 'created')
  end
  redis.call('DEL', mine)
  redis.call('HSET', mine, 'secret', args.secret, 'created', args.at)
  if former[1] then
    redis.call('HSET', mine, 'former', former[1], 'former_created', former[2], 'former_until', args.ends)
  end
end
return redis.call('HMGET', mine, 'secret', 'created', 'former', 'former_created', 'former_until')
