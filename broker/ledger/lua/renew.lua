-- A live worker's word on what it holds.
-- args: worker, boot, lease_s, then (id, attempt) per job
-- returns {ids it no longer holds}, {ids that are to be cancelled}
local worker, boot, lease_s = unpack(ARGV, FIRST, FIRST + 2)
local lost, cancelling = {}, {}
for at = FIRST + 3, #ARGV, 2 do
  local job = read(ARGV[at])
  local same = job and job.attempt == tonumber(ARGV[at + 1])
  if same and working(job, job.attempt) and job.worker == worker and job.boot == boot then
    if not job.generated then -- once generated, the lease is the deadline of its receipts
      local lease = now + tonumber(lease_s)
      if job.lease < now + 2 * tonumber(lease_s) then -- beyond is a clock that went wrong
        lease = math.max(job.lease, lease) -- a renewal that was long on its way comes after younger ones
      end
      redis.call('HSET', key('job', job.id), 'lease', lease)
      look_at(job, lease)
    end
    if job.state == 'cancelling' then
      cancelling[#cancelling + 1] = job.id
    end
  elseif not (same and job.state == 'succeeded') then
    lost[#lost + 1] = ARGV[at]
  end
end
return {lost, cancelling}
