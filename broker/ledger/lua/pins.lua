-- Tensors of modules and of global steering: who holds them, and that they go with the last holder.

-- The tensor is not this owner's any more; nobody's tensor is not kept.
local function unpin(name, owner)
  redis.call('SREM', key('pinners', name), owner)
  if redis.call('SCARD', key('pinners', name)) == 0 then
    redis.call('DEL', key('pinned', name))
  end
end

-- Let `owner` hold these tensors, and no others any more: {sha256, bytes, or false if it is pinned already} of each. Returns the first
-- that is nowhere, and has done nothing then.
local function pin(owner, tensors)
  local wanted = {}
  for _, tensor in ipairs(tensors) do
    local name, bytes = unpack(tensor)
    if not bytes and redis.call('EXISTS', key('pinned', name)) == 0 then
      return name
    end
    wanted[name] = true
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
    if not wanted[name] then
      redis.call('SREM', key('pins', owner), name)
      unpin(name, owner)
    end
  end
end

-- What one owner held is another's now, who lets go of what it had.
local function hand_over(owner, heir)
  local left = redis.call('SMEMBERS', key('pins', owner))
  local former = redis.call('SMEMBERS', key('pins', heir))
  redis.call('DEL', key('pins', owner), key('pins', heir))
  for _, name in ipairs(left) do
    redis.call('SADD', key('pinners', name), heir)
    redis.call('SADD', key('pins', heir), name)
    redis.call('SREM', key('pinners', name), owner)
  end
  for _, name in ipairs(former) do
    if redis.call('SISMEMBER', key('pins', heir), name) == 0 then
      unpin(name, heir)
    end
  end
end

local function close_proposal(state)
  redis.call('HDEL', state, 'proposal_id', 'proposal_version', 'proposal_deadline', 'proposal', 'proposed')
end
