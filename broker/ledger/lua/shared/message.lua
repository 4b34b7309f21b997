-- Sending of a job's message, in the commit that gives the job its turn, and of Celery's events for the end of its tasks, in the commit
-- that ends it. `messages.py` generates the templates MESSAGE, SENT and ENDED.
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

-- The task of the message that is sent after so many attempts.
local function task_of(job, attempts)
  return attempts == 0 and job.id or job.id .. '.' .. attempts
end

-- kombu's prefix has the number of the database, which Lua cannot query. Users of an older `users.acl` may not publish every event.
local function publish(name, text)
  redis.pcall('PUBLISH', args.channels .. TASK_CHANNELS .. name, text)
end

-- Put the job's message into its queue and notify Flower. Every message has a unique tag: its task and the time.
local function post(job)
  local of = {job = job.id, task = task_of(job, job.attempt), kind = job.kind, queue = queue_of(job), step = job.step, at = args.at}
  local list = job.step == 0 and of.queue or of.queue .. SEPARATOR .. job.step
  -- A queue that accepts no message must not undo the change of the job's state.
  if type(redis.pcall('LPUSH', list, MESSAGE(of))) == 'table' then
    look_at(job, now) -- refused: a user of an older `users.acl` may not write queues; the reaper may
    return
  end
  publish('sent', SENT(of))
  posted[#posted + 1] = job.id
end

-- Notify Flower that the job has ended, for all of its tasks: to `attempts`, after which the last message was sent. A worker does not: the
-- job may end with its receipts, or in the attempt of another worker.
local function report_end(job, attempts)
  local started, problem = unpack(redis.call('HMGET', key('job', job.id), 'started', 'error'))
  local info = job.worker and redis.call('HGET', 'ms:workers', job.worker)
  local told = {hostname = info and job.worker .. '@' .. cjson.decode(info).host or ORIGIN, timestamp = now, utcoffset = 0, pid = 0}
  local name = 'revoked'
  if job.state == 'succeeded' then
    name, told.result, told.runtime = job.state, job.state, started and now - started
  elseif job.state == 'failed' then
    problem = cjson.decode(problem)
    name, told.exception, told.traceback = job.state, problem.title .. ': ' .. problem.detail, ''
  end
  told.type = 'task-' .. name
  for made = 0, attempts do
    told.uuid = task_of(job, made)
    publish(name, ENDED({task = told.uuid, at = args.at, name = name, body = cjson.encode(cjson.encode(told))}))
  end
end
