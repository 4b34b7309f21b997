-- Keep the records of units that a job has computed, each once, and what else it reports of the whole that it is a part of, if its attempt
-- is current.
-- They outlive the attempt.
-- args: id, attempt, place (key of the records), units: {field, packed record, counts (counter -> what is added; false: readers see no
--       change), its event (JSON, or false if it has none), requests (whose receipts the record was made of)} of each, ranks, stages
--       of a part: whole (key of the record of the whole, which has the counters, or nil), open (key of the side jobs that have not ended,
--       of which this is one, or nil), set (field -> value, or nil), clear (fields, or nil), done (key of records that are no longer needed,
--       or nil)
-- returns 'unknown' | 'stale' | 'cancelling' (cancellation was requested, or the whole has ended: nothing is kept) | 'kept'
local id, whole = args.id, args.whole
local job, why = job_of(id, args.attempt)
if not job then
  return why
end
local owner, tenant = key('job', id), job.tenant
if whole then
  local finished, wanted
  owner = whole
  finished, wanted, tenant = unpack(redis.call('HMGET', whole, 'finished', 'wanted', 'tenant'))
  -- Only a side job is recorded once the whole has ended, and nothing once it is deleted or being cancelled.
  if not tenant or (finished and not args.open) or wanted == 'cancel' then
    move(job, 'cancelling') -- no other attempt follows
  end
end
if job.state == 'cancelling' then
  return 'cancelling'
end
local shown, sums = false, {}
for _, unit in ipairs(args.units) do
  local field, record, counts, body, requests = unpack(unit)
  if redis.call('HSETNX', args.place, field, record) == 1 and counts then
    shown = true
    for name, more in pairs(counts) do
      sums[name] = (sums[name] or 0) + more
    end
    if body then
      redis.call('XADD', key('events', id), 'MAXLEN', '~', events_kept(job), '*', 'e', body)
    end
  end
  -- The record contains everything needed from the ranks' receipts.
  for _, request in ipairs(requests) do
    local tickets, agreed = {}, {}
    for rank = 0, args.ranks - 1 do
      tickets[#tickets + 1] = request .. '/' .. rank
    end
    for stage = 0, args.stages - 1 do
      agreed[#agreed + 1] = request .. '/' .. stage
      agreed[#agreed + 1] = request .. '/' .. stage .. '/read'
    end
    redis.call('HDEL', key('ticket', id), unpack(tickets))
    redis.call('HDEL', key('agree', id), unpack(agreed))
  end
end
if shown then
  for name, more in pairs(sums) do
    redis.call('HINCRBY', owner, name, more)
  end
  redis.call('HDEL', owner, 'store_away', 'trouble') -- why a job, or the whole, waited for its store
end
if not whole then
  if shown then
    tally_cells(job, -(sums.cells or 0))
    changed(job)
  end
  return 'kept'
end
tally(owner, tenant, 'bytes', sums.bytes or 0)
if args.open then
  redis.call('SREM', args.open, id)
end
if args.done then
  redis.call('DEL', args.done)
end
for name, value in pairs(args.set or {}) do
  redis.call('HSET', owner, name, value)
end
for _, name in ipairs(args.clear or {}) do
  redis.call('HDEL', owner, name)
end
redis.call('HINCRBY', owner, 'version', 1)
return 'kept'
