-- A stream's sender has lost a range of receipts: the jobs whose current attempts need them fail, and the mark passes the range.
-- keys: the mark of (worker, rank, epoch)
-- args: first, last, worker, rank, message, jobs (JOB.ATTEMPT of each; older outboxes omit the attempt: their jobs
--       fail when their receipts are overdue)
-- returns {mark, jobs failed}
local first, last, worker = args.first, args.last, args.worker
local mark = tonumber(redis.call('GET', KEYS[1]) or '0')
if first > mark + 1 or last <= mark then
  return {mark, 0} -- beyond a gap, or reported before
end
local failed = 0
for _, name in ipairs(args.jobs) do
  local id, attempt = string.match(name, '^(.*)%.(%d+)$')
  local job = id and read(id)
  -- A sweep continues: only cells with missing receipts fail.
  if job and working(job, attempt) and job.state == 'running' and job.worker == worker and not READS_RECEIPTS[job.kind] then
    local kind = (job.captures or not job.steers) and 'capture_failed' or 'intervention_failed'
    if fail(job, kind, 'rank ' .. args.rank .. ' of worker ' .. worker .. ' lost its receipts ' .. first .. ' to ' .. last .. ': '
      .. (args.message ~= '' and args.message or 'its outbox was damaged')) then
      failed = failed + 1
    end
  end
end
redis.call('SET', KEYS[1], last, 'EX', MARK_TTL_S)
return {last, failed}
