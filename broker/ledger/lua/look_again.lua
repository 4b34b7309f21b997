-- The message of a queued job was looked for: where there is none another is sent, and it is looked at again later.
-- args: id, attempt (attempts made when it was looked for), there (whether there is one), later (when to look again)
-- returns 1 where a message was sent, else 0
local job = read(args.id)
if not job or job.state ~= 'queued' or job.attempt ~= args.attempt then
  return 0
end
look_at_queued(job, args.later)
if not args.there then
  post(job)
end
return #posted
