-- Rebuild each tenant's list of modules, on which its limits are checked, from the modules: processes of versions older than
-- these lists put, change and delete modules without updating them.
-- returns {entry, listed value, actual value, ...} for each difference
local owned = {}
for _, tenant in ipairs(redis.call('SMEMBERS', 'ms:owners')) do
  owned[tenant] = {}
end
for _, model in ipairs(redis.call('HKEYS', 'ms:models')) do
  local modules = redis.call('HGETALL', key('modules', model))
  for at = 1, #modules, 2 do
    local name, packed = modules[at], modules[at + 1]
    local tenant = string.match(name, '^(.-)/') or 'default'
    owned[tenant] = owned[tenant] or {}
    owned[tenant][model .. '/' .. name] = cmsgpack.unpack(packed).bytes + #packed -- as `size_of` in scripts.py
  end
end
local differed = {}
for tenant, sizes in pairs(owned) do
  local list, was, is, same = key('module-bytes', tenant), 0, 0, true
  local listed = redis.call('HGETALL', list)
  for at = 1, #listed, 2 do
    local size = tonumber(listed[at + 1])
    was, same = was + size, same and sizes[listed[at]] == size
  end
  for _, size in pairs(sizes) do
    is = is + size
  end
  if not same or was ~= is then
    redis.call('DEL', list)
    for place, size in pairs(sizes) do
      redis.call('HSET', list, place, size)
    end
    for _, value in ipairs({tenant .. '/module_bytes', was, is}) do
      differed[#differed + 1] = value
    end
  end
end
return differed
