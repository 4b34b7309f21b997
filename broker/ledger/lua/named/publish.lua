-- Publish a worker's model together with its heartbeat, unless a live worker serves a model of another identity under the name.
-- args: name, worker, boot, identity, model (JSON), info (of the worker, JSON), lease_s
-- returns {'refused', the other worker, its identity ('': it reports none)} | {'published'}
for _, raw in ipairs(redis.call('HVALS', 'ms:workers')) do
  local other = cjson.decode(raw)
  if other.worker ~= args.worker and (other.queue or '') == '' and other.model == args.name and other.identity ~= args.identity
    and redis.call('GET', key('alive', other.worker)) == other.boot then
    return {'refused', other.worker, other.identity or ''}
  end
end
redis.call('HSET', 'ms:models', args.name, args.model)
redis.call('HSET', 'ms:workers', args.worker, args.info)
redis.call('SET', key('alive', args.worker), args.boot, 'PX', math.floor(args.lease_s * 1000))
return {'published'}
