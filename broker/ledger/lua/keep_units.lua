-- Units of a sweep about which every rank has reported: what became of them stays, whatever becomes of the attempt.
-- args: id, attempt, requests of a unit, ranks, stages, then (unit, packed record, its `cell` event (JSON), or '' for what is no cell)
-- returns 'unknown' | 'stale' | 'cancelling' (nobody wants them any more: not kept) | 'kept'
local id, attempt, width, ranks, stages = unpack(ARGV, FIRST, FIRST + 4)
local job, why = job_of(id, attempt)
if not job then
  return why
end
if job.state == 'cancelling' then
  return 'cancelling'
end
local cells = 0
for at = FIRST + 5, #ARGV, 3 do
  local unit, record, body = ARGV[at], ARGV[at + 1], ARGV[at + 2]
  if redis.call('HSETNX', key('units', id), unit, record) == 1 and body ~= '' then
    redis.call('XADD', key('events', id), 'MAXLEN', '~', events_kept(job), '*', 'e', body)
    cells = cells + 1
  end
  -- What the ranks told is in the record, as far as it matters.
  for request = unit * width, (unit + 1) * width - 1 do
    request = string.format('%d', request)
    local tickets, agreed = {}, {}
    for rank = 0, ranks - 1 do
      tickets[#tickets + 1] = request .. '/' .. rank
    end
    for stage = 0, stages - 1 do
      agreed[#agreed + 1] = request .. '/' .. stage
    end
    redis.call('HDEL', key('ticket', id), unpack(tickets))
    redis.call('HDEL', key('agree', id), unpack(agreed))
  end
end
if cells > 0 then
  redis.call('HINCRBY', key('job', id), 'cells', cells)
  tally_cells(job, -cells)
  changed(job)
end
return 'kept'
