-- The recount (recount.lua) is complete: its result replaces the usage counters.
-- args: name (of the count)
-- returns {counter, former value, actual value, ...} for each difference; {''} if another count has replaced it, or Redis has restarted
if redis.call('HGET', RECOUNT, 'name') ~= of_this_start(args.name) then
  return {''}
end
redis.call('HDEL', RECOUNT, 'name')
local function numbers(hash)
  local result, flat = {}, redis.call('HGETALL', hash)
  for at = 1, #flat, 2 do
    result[flat[at]] = tonumber(flat[at + 1])
  end
  return result
end
local was, is = numbers('ms:usage'), numbers(RECOUNT)
local differed = {}
for field, counted in pairs(was) do
  is[field] = is[field] or 0
end
for field, number in pairs(is) do
  local counted = was[field] or 0
  if counted ~= number then
    for _, value in ipairs({field, counted, number}) do
      differed[#differed + 1] = value
    end
    redis.call('HSET', 'ms:usage', field, number)
  end
  if number == 0 then
    redis.call('HDEL', 'ms:usage', field)
  end
end
redis.call('UNLINK', RECOUNT, SEEN)
return differed
