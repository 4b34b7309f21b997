-- The message of a queued job was looked for: where there is none another is sent, and it is looked at again later.
-- args: id, attempts made when it was looked for, whether there is one ('1' or '0'), when to look again
-- returns 1 where a message was sent, else 0
local id, attempt, there, at = unpack(ARGV, FIRST, FIRST + 3)
local job = read(id)
if not job or job.state ~= 'queued' or job.attempt ~= tonumber(attempt) then
  return 0
end
look_at_queued(job, tonumber(at))
if there == '0' then
  post(job)
end
return #posted
