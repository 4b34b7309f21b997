-- Sending of a job's message, in the commit that gives the job its turn. `messages.py` generates the templates MESSAGE and SENT.
-- The broker is this Redis. A message that a process sent after the commit could be lost with it.

local posted = {} -- ids of the jobs whose messages this script has put into their queues

-- The code point of a character, as `celery_app.queue_of` escapes characters that are not allowed in a queue's name.
local function code(char)
  local first = string.byte(char)
  local point = first < 128 and first or first % 2 ^ (7 - #char)
  for at = 2, #char do
    point = point * 64 + string.byte(char, at) % 64
  end
  return string.format('_%x_', point)
end

local function queue_of(job)
  local name = 'midstream.' .. string.gsub(job.model, '[^A-Za-z0-9.-][\128-\191]*', code)
  return job.queue == '' and name or name .. '_' .. job.queue
end

-- Put the job's message into its queue and notify Flower. Every message has a unique tag: its task and the time.
local function post(job)
  local task = job.attempt == 0 and job.id or job.id .. '.' .. job.attempt
  local of = {job = job.id, task = task, kind = job.kind, queue = queue_of(job), step = job.step, at = args.at}
  local list = job.step == 0 and of.queue or of.queue .. SEPARATOR .. job.step
  -- A queue that accepts no message must not undo the change of the job's state.
  if type(redis.pcall('LPUSH', list, MESSAGE(of))) == 'table' then
    look_at(job, now) -- refused: a user of an older `users.acl` may not write queues; the reaper may
    return
  end
  -- kombu's prefix has the number of the database, which Lua cannot query.
  redis.pcall('PUBLISH', args.channels .. SENT_CHANNEL, SENT(of))
  posted[#posted + 1] = job.id
end
