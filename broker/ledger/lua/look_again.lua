-- A queued job has its message (or has just got one): look at it later.
-- args: id, at
local job = read(ARGV[FIRST])
if job and job.state == 'queued' then
  look_at_queued(job, tonumber(ARGV[FIRST + 1]))
end
return 'ok'
