-- Forget workers that are gone and hold nothing; one that returns registers again.
-- returns their ids
local forgotten = {}
for _, worker in ipairs(redis.call('HKEYS', 'ms:workers')) do
  if redis.call('EXISTS', key('alive', worker), key('held', worker)) == 0 then
    redis.call('HDEL', 'ms:workers', worker)
    redis.call('HDEL', DESYNC, worker)
    redis.call('HDEL', SETTLED, worker)
    redis.call('DEL', key('run-cache', worker))
    forgotten[#forgotten + 1] = worker
  end
end
return forgotten
