-- Remove what is left of a model whose artifacts are deleted: global steering and its tensors, names of source runs, counts, tokenizer,
-- and last its entry, unless a live worker serves it. A worker that serves it again writes a new entry.
-- args: model
-- returns {'served', worker} | {'deleted', whether there was an entry, 1 or 0}
local model = args.model
for _, raw in ipairs(redis.call('HVALS', 'ms:workers')) do
  local worker = cjson.decode(raw)
  if worker.model == model and redis.call('GET', key('alive', worker.worker)) == worker.boot then
    return {'served', worker.worker}
  end
end
pin('global:' .. model, {})
redis.call('DEL', key('steering', model), key('steering-checks', model), key('runs', model))
redis.call('DEL', key('policies-watching', model), key('policies-changes', model))
for _, field in ipairs(redis.call('HKEYS', 'ms:counts')) do
  if string.sub(field, 1, #model + 1) == model .. '/' then
    redis.call('HDEL', 'ms:counts', field)
  end
end
local entry, shared = redis.call('HGET', 'ms:models', model), false
for _, other in ipairs(redis.call('HVALS', 'ms:models')) do
  shared = shared or other ~= entry and cjson.decode(other).tokenizer == cjson.decode(entry or '{}').tokenizer
end
if entry and not shared then
  redis.call('DEL', key('blob', cjson.decode(entry).tokenizer))
end
redis.call('HDEL', 'ms:gradients', model)
return {'deleted', redis.call('HDEL', 'ms:models', model)}
