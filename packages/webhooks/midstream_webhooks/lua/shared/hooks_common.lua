-- Functions shared by the outbox's scripts.

local function hook_end(id, lane, state)
  redis.call('HSET', 'ms:hook:' .. id, 'state', state)
  redis.call('HDEL', 'ms:hook:' .. id, 'next', 'pause', 'lease')
  redis.call('ZREM', 'ms:hooks', id)
  redis.call('SREM', 'ms:hook-pending:' .. hook_owner(lane), id)
  redis.call('ZREM', 'ms:hook-lane:' .. lane, id)
  redis.call('ZREM', 'ms:hook-busy:' .. lane, id)
  redis.call('ZADD', 'ms:hook-done', args.at, id)
end
