-- Publish a worker's model, or what a gradient worker knows of it, together with its heartbeat, unless a live worker serves a model of
-- another identity under the name. A gradient worker has to fit the workers of the model; only while there is none, other gradient workers.
-- args: name, queue (of the worker), worker, boot, identity, model (JSON), info (of the worker, JSON), lease_s
-- returns {'refused', the other worker, its identity ('': it reports none)} | {'published'}
local others = {} -- queue -> a live worker of the name; one of another identity, if there is one
for _, raw in ipairs(redis.call('HVALS', 'ms:workers')) do
  local other = cjson.decode(raw)
  local queue = other.queue or ''
  if other.worker ~= args.worker and other.model == args.name and redis.call('GET', key('alive', other.worker)) == other.boot
    and (not others[queue] or other.identity ~= args.identity) then
    others[queue] = other
  end
end
local other = others[''] or others[args.queue]
-- In the commit that stores the liveness, so that of two workers that start at once one is refused.
-- Otherwise half of the accepted requests would fail.
if other and other.identity ~= args.identity then
  return {'refused', other.worker, other.identity or ''}
end
-- A gradient worker is not counted where the service asks who serves a model, or compares ranks.
redis.call('HSET', args.queue == '' and 'ms:models' or 'ms:gradients', args.name, args.model)
redis.call('HSET', 'ms:workers', args.worker, args.info)
redis.call('SET', key('alive', args.worker), args.boot, 'PX', math.floor(args.lease_s * 1000))
return {'published'}
