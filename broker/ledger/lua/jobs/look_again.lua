-- Result of a search for a queued job's message: if it is missing, another is sent; either way the job is checked again later.
-- args: id, attempt (attempts made at the time of the search), present (whether it was found), later (time of the next check)
-- returns 1 if a message was sent, else 0
local job = read(args.id)
if not job or job.state ~= 'queued' or job.attempt ~= args.attempt then
  return 0
end
look_at_queued(job, args.later)
if not args.present then
  post(job)
end
return #posted
