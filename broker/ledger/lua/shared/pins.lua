-- Tensors of modules and of global steering: their owners, and their deletion with the last one.

-- Remove this owner from the tensor; a tensor without owners is deleted.
local function unpin(name, owner)
  redis.call('SREM', key('pinners', name), owner)
  if redis.call('SCARD', key('pinners', name)) == 0 then
    redis.call('DEL', key('pinned', name))
  end
end

-- Make `owner` hold exactly these tensors: {sha256, bytes, or false if it is already pinned} of each. Returns the first
-- that is missing; then nothing has changed.
local function pin(owner, tensors)
  local kept = {}
  for _, tensor in ipairs(tensors) do
    local name, bytes = unpack(tensor)
    if not bytes and redis.call('EXISTS', key('pinned', name)) == 0 then
      return name
    end
    kept[name] = true
  end
  for _, tensor in ipairs(tensors) do
    local name, bytes = unpack(tensor)
    if bytes then
      redis.call('SET', key('pinned', name), bytes)
    end
    redis.call('SADD', key('pinners', name), owner)
    redis.call('SADD', key('pins', owner), name)
  end
  for _, name in ipairs(redis.call('SMEMBERS', key('pins', owner))) do
    if not kept[name] then
      redis.call('SREM', key('pins', owner), name)
      unpin(name, owner)
    end
  end
end

-- Give a job its own copy of a tensor, `bytes` or the pinned one: it outlives what pins it.
local function copy_for_job(name, bytes)
  local blob = key('blob', name)
  if bytes then
    redis.call('SET', blob, bytes)
  elseif redis.call('EXISTS', blob) == 0 then
    redis.call('COPY', key('pinned', name), blob)
  end
  redis.call('EXPIRE', blob, args.blob_ttl)
end
