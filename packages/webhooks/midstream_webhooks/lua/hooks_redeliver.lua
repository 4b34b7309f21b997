-- Send a delivery again, or now: under the same id, with the retry schedule from its start.
-- args: id, pending_limit (0: none)
-- returns 'unknown' | 'full' (its tenant has that many pending deliveries) | 'pending'
local id = args.id
local hook = 'ms:hook:' .. id
local state, tenant, url, lease, policy = unpack(redis.call('HMGET', hook, 'state', 'tenant', 'url', 'lease', 'policy'))
if not state then
  return 'unknown'
end
local counts = state ~= 'pending' and not policy and args.pending_limit > 0 -- a pending one is counted already
if counts and redis.call('SCARD', 'ms:hook-pending:' .. tenant) >= args.pending_limit then
  return 'full'
end
if not lease then -- otherwise it is being sent
  redis.call('HSET', hook, 'tries', 0)
  redis.call('HDEL', hook, 'pause')
  redis.call('ZREM', 'ms:hook-done', id)
  hook_put(id, hook_lane(tenant, url), args.at)
end
return 'pending'
