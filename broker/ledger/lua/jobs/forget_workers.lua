-- Forget workers that are gone and hold nothing; one that returns registers again. With a gradient worker goes what it published, unless
-- it fits the model: then jobs wait for it, as they do for the model's own workers.
-- returns their ids
local forgotten = {}
for _, worker in ipairs(redis.call('HKEYS', 'ms:workers')) do
  if redis.call('EXISTS', key('alive', worker), key('held', worker)) == 0 then
    local gone = cjson.decode(redis.call('HGET', 'ms:workers', worker))
    local known, served = redis.call('HGET', 'ms:gradients', gone.model), redis.call('HGET', 'ms:models', gone.model)
    if known and (gone.queue or '') ~= '' and cjson.decode(known).identity == gone.identity
      and not (served and cjson.decode(served).identity == gone.identity) then
      redis.call('HDEL', 'ms:gradients', gone.model)
    end
    redis.call('HDEL', 'ms:workers', worker)
    redis.call('HDEL', DESYNC, worker)
    redis.call('HDEL', SETTLED, worker)
    redis.call('DEL', key('run-cache', worker))
    forgotten[#forgotten + 1] = worker
  end
end
return forgotten
