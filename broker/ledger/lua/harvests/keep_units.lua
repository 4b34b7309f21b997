-- Store the outcomes of sweep units that every rank has reported on; they outlive the attempt.
-- args: id, attempt, width (requests of a unit), ranks, stages, units: {number, packed record, its event (JSON), or false if it has
--       none, whether it is a cell} of each
-- returns 'unknown' | 'stale' | 'cancelling' (cancellation was requested: not kept) | 'kept'
local id, width = args.id, args.width
local job, why = job_of(id, args.attempt)
if not job then
  return why
end
if job.state == 'cancelling' then
  return 'cancelling'
end
local cells, kept_any = 0, false
for _, kept in ipairs(args.units) do
  local unit, record, body, cell = unpack(kept)
  if redis.call('HSETNX', key('units', id), unit, record) == 1 and body then
    redis.call('XADD', key('events', id), 'MAXLEN', '~', events_kept(job), '*', 'e', body)
    cells = cells + (cell and 1 or 0)
    kept_any = true
  end
  -- The record contains everything needed from the ranks' receipts.
  for request = unit * width, (unit + 1) * width - 1 do
    request = string.format('%d', request)
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
if kept_any then
  redis.call('HINCRBY', key('job', id), 'cells', cells)
  redis.call('HDEL', key('job', id), 'store_away')
  tally_cells(job, -cells)
  changed(job)
end
return 'kept'
