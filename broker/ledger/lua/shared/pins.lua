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

-- Transfer one owner's tensors to another, which releases those it had.
local function hand_over(owner, heir)
  local moved = redis.call('SMEMBERS', key('pins', owner))
  local former = redis.call('SMEMBERS', key('pins', heir))
  redis.call('DEL', key('pins', owner), key('pins', heir))
  for _, name in ipairs(moved) do
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
