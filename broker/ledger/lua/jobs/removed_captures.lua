-- Deleted captures are fully removed: stop looking for their files.
-- args: jobs: {id, start of the deletion as the caller knows it} of each
-- returns how many; a job for which more files were reported meanwhile stays
local ended = 0
for _, deleted in ipairs(args.jobs) do
  local id, known = unpack(deleted)
  local since = redis.call('ZSCORE', 'ms:deleting', id)
  if since and tonumber(since) == known then
    ended = ended + redis.call('ZREM', 'ms:deleting', id)
  end
end
return ended
