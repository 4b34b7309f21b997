-- Nothing is left of deleted captures: they are no longer looked for.
-- args: (id, since when it was being deleted, as the caller knows it) per job
-- returns how many; one of which more was reported meanwhile stays
local ended = 0
for at = FIRST, #ARGV, 2 do
  local since = redis.call('ZSCORE', 'ms:deleting', ARGV[at])
  if since and tonumber(since) == tonumber(ARGV[at + 1]) then
    ended = ended + redis.call('ZREM', 'ms:deleting', ARGV[at])
  end
end
return ended
