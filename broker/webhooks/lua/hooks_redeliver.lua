-- Send a delivery again, or now: under the same id, with the retry schedule from its start.
-- args: id, pending_limit (0: none)
-- returns 'unknown' | 'off' (its receiver is disabled) | 'full' (its tenant has that many pending deliveries) | 'crowded' (its policy
--         has `HOOK_POLICY_ROOM`) | 'pending'
local id = args.id
local hook = 'ms:hook:' .. id
local state, tenant, url, lease, policy = unpack(redis.call('HMGET', hook, 'state', 'tenant', 'url', 'lease', 'policy'))
if not state then
  return 'unknown'
end
if redis.call('HEXISTS', 'ms:hook-off', tenant .. '|' .. url) == 1 then
  return 'off'
end
if state == 'pending' then
  -- it is counted already
elseif policy and redis.call('ZCARD', 'ms:hook-policy:' .. policy) >= HOOK_POLICY_ROOM then
  return 'crowded'
elseif not policy and args.pending_limit > 0 and redis.call('SCARD', 'ms:hook-pending:' .. tenant) >= args.pending_limit then
  return 'full'
end
if not lease then -- otherwise it is being sent
  redis.call('HSET', hook, 'tries', 0)
  redis.call('HDEL', hook, 'pause')
  redis.call('ZREM', 'ms:hook-done', id)
  hook_put(id, hook_lane(tenant, url), args.at)
end
return 'pending'
