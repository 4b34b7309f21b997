-- What is in use, counted anew from the jobs that are not over and the captures that are kept. It is the same as what was counted
-- all along, but for what an older version did without counting. And every queued job is found where the sweeper looks.
-- returns {what, as it was counted, as it is, ...} of what differed
local is = {}
local function add(tenant, what, by)
  if by ~= 0 then
    local name = tenant .. '/' .. what
    is[name] = (is[name] or 0) + by
  end
end
for _, id in ipairs(redis.call('ZRANGE', 'ms:live', 0, -1)) do
  local job = read(id)
  if job and not TERMINAL[job.state] then
    add(job.tenant, 'jobs', 1)
    if job.kind == 'sweep' then
      add(job.tenant, 'cells', job.cells_expected - job.cells)
      add('', 'cells', job.cells_expected - job.cells)
    end
    if job.state == 'queued' then
      add('', 'queued', 1)
      if redis.call('SISMEMBER', turn('sent', job.model, job.step), id) == 0
        and not redis.call('ZSCORE', turn('wait', job.model, job.step, job.tenant), id) then
        look_at(job, now)
      end
    end
  end
end
for _, id in ipairs(redis.call('ZRANGE', 'ms:captures', 0, -1)) do
  local tenant, bytes = unpack(redis.call('HMGET', key('capture', id), 'charged', 'bytes'))
  if tenant then
    add(tenant, 'bytes', tonumber(bytes))
  end
end
local differed = {}
local was = redis.call('HGETALL', 'ms:usage')
for at = 1, #was, 2 do
  local name, counted = was[at], tonumber(was[at + 1])
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
