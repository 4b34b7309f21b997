-- A new signing secret; the one before it signs as well for a while.
-- args: now, owner of the secrets, the new one, until when the former one signs, owner of the former one when this has none yet,
--       '1' to leave it as it is when there is one
-- returns {secret, created, former or '', its creation, its end}
local owner, secret, ends, heir_of, keep = unpack(ARGV, 2)
local mine = 'ms:hook-secret:' .. owner
if not (keep == '1' and redis.call('EXISTS', mine) == 1) then
  local former = redis.call('HMGET', mine, 'secret', 'created')
  if not former[1] and heir_of ~= '' then
    former = redis.call('HMGET', 'ms:hook-secret:' .. heir_of, 'secret', 'created')
  end
  redis.call('DEL', mine)
  redis.call('HSET', mine, 'secret', secret, 'created', ARGV[1])
  if former[1] then
    redis.call('HSET', mine, 'former', former[1], 'former_created', former[2], 'former_until', ends)
  end
end
return redis.call('HMGET', mine, 'secret', 'created', 'former', 'former_created', 'former_until')
