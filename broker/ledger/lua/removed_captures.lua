-- Nothing is left of deleted captures: they are no longer looked for.
-- args: jobs: {id, since when it was being deleted, as the caller knows it} of each
-- returns how many; one of which more was reported meanwhile stays
local ended = 0
for _, deleted in ipairs(args.jobs) do
  local id, known = unpack(deleted)
  local since = redis.call('ZSCORE', 'ms:deleting', id)
  if since and tonumber(since) == known then
    ended = ended + redis.call('ZREM', 'ms:deleting', id)
  end
end
return ended
