-- Renew the leases that a live worker reports.
-- args: worker, boot, lease_s, held: {id, attempt} of each job
-- returns {ids it no longer holds}, {ids that are to be cancelled}
local lost, cancelling = {}, {}
for _, held in ipairs(args.held) do
  local id, attempt = unpack(held)
  local job = read(id)
  local same = job and job.attempt == attempt
  if same and working(job, job.attempt) and job.worker == args.worker and job.boot == args.boot then
    if not job.generated then -- once generated, the lease is the deadline of its receipts
      local lease = now + args.lease_s
      if job.lease < now + 2 * args.lease_s then -- a later lease comes from a wrong clock
        lease = math.max(job.lease, lease) -- a delayed renewal may arrive after newer ones
      end
      redis.call('HSET', key('job', job.id), 'lease', lease)
      look_at(job, lease)
    end
    if job.state == 'cancelling' then
      cancelling[#cancelling + 1] = job.id
    end
  elseif not (same and job.state == 'succeeded') then
    lost[#lost + 1] = id
  end
end
return {lost, cancelling}
