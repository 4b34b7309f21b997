-- What is in use, counted anew from the jobs that are not over and the captures that are kept. It is the same as what was counted
-- all along, but for what an older version did without counting. And every queued job is found where the sweeper looks.
-- args: how many captures are counted at most
-- returns {what, as it was counted, as it is, ...} of what differed
local is = {}
local function add(tenant, what, by)
  if by ~= 0 then
    local name = tenant .. '/' .. what
    is[name] = (is[name] or 0) + by
  end
end
-- Only what is needed is read: there may be 100,000 jobs, and nobody else is served meanwhile.
for _, id in ipairs(redis.call('ZRANGE', 'ms:live', 0, -1)) do
  local state, kind, tenant, expected, cells, model, step =
    unpack(redis.call('HMGET', key('job', id), 'state', 'kind', 'tenant', 'cells_expected', 'cells', 'model', 'step'))
  if state and not TERMINAL[state] then
    tenant = tenant or 'default'
    add(tenant, 'jobs', 1)
    if kind == 'sweep' then
      add(tenant, 'cells', tonumber(expected) - tonumber(cells))
      add('', 'cells', tonumber(expected) - tonumber(cells))
    end
    if state == 'queued' then
      add('', 'queued', 1)
      step = step or STEPS[kind].normal
      if not redis.call('ZSCORE', turn('wait', model, step, tenant), id)
        and redis.call('SISMEMBER', turn('sent', model, step), id) == 0 then
        redis.call('ZADD', 'ms:live', now, id)
      end
    end
  end
end
local whole = redis.call('ZCARD', 'ms:captures') <= tonumber(ARGV[FIRST]) -- else bytes stay as they were counted
for _, id in ipairs(whole and redis.call('ZRANGE', 'ms:captures', 0, -1) or {}) do
  local tenant, bytes = unpack(redis.call('HMGET', key('capture', id), 'charged', 'bytes'))
  if tenant then
    add(tenant, 'bytes', tonumber(bytes))
  end
end
local differed = {}
local was = redis.call('HGETALL', 'ms:usage')
for at = 1, #was, 2 do
  local name, counted = was[at], tonumber(was[at + 1])
  if not whole and string.sub(name, -6) == '/bytes' then
    is[name] = counted
  end
  if counted ~= (is[name] or 0) then
    for _, value in ipairs({name, counted, is[name] or 0}) do
      differed[#differed + 1] = value
    end
  end
  is[name] = is[name] or false
end
for name, number in pairs(is) do
  if number then
    redis.call('HSET', 'ms:usage', name, number)
  else
    redis.call('HDEL', 'ms:usage', name)
  end
end
return differed
