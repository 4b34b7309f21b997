-- Refill the dispatch windows: drop claimed and ended jobs from the count, then send waiting messages for which there is room.
-- returns ids of the jobs whose messages were sent
for _, name in ipairs(redis.call('SMEMBERS', 'ms:queues')) do
  local model, line = string.match(name, '^(.*):(%d[%d.a-z]*)$')
  local sent = turn('sent', model, line)
  for _, id in ipairs(redis.call('SMEMBERS', sent)) do
    if redis.call('HGET', key('job', id), 'state') ~= 'queued' then
      redis.call('SREM', sent, id)
    end
  end
  fill(model, line)
  if redis.call('SCARD', sent) == 0 and not front(model, line) then
    redis.call('SREM', 'ms:queues', name)
  end
end
return posted
