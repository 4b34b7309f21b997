-- Order in which messages are sent. A queued job's message is sent while fewer than `args.window` of its model and line are in flight
-- (sent and not claimed); the other jobs wait here, per tenant, and the tenant with the least virtual time is next (stride scheduling).
-- A line is the jobs of one queue and step: `6` of the vLLM workers, `6.gradients` of the gradient workers.
-- Celery's lists are first in, first out, and kombu would take turns between queues, whatever a job
-- costs. So few messages are under way, and the next job is chosen as late as possible.

local function turn(what, model, line, tenant)
  return 'ms:' .. what .. ':' .. model .. ':' .. line .. (tenant and ':' .. tenant or '')
end

-- Whether a job has expired: only jobs that never began can expire.
local function overdue(job)
  return job.attempt == 0 and job.expires and job.expires <= now
end

-- Schedule the next check of a queued job: at `at`, or when it expires.
local function look_at_queued(job, at)
  look_at(job, job.attempt == 0 and job.expires and math.min(job.expires, at) or at)
end

local function send(job)
  redis.call('SADD', turn('sent', job.model, job.line), job.id)
  look_at_queued(job, now + QUEUED_LOOK_S)
  post(job)
end

-- The tenant whose turn it is, and its virtual time; nil if no job waits. Idle tenants are forgotten once their
-- time is past: a returning tenant starts at the virtual time of the waiting ones.
local function front(model, line)
  -- Kept until then: otherwise, a tenant that submits one job at a time would always be next.
  while true do
    local tenant, at = unpack(redis.call('ZRANGE', turn('fair', model, line), 0, 0, 'WITHSCORES'))
    if not tenant or redis.call('EXISTS', turn('wait', model, line, tenant)) == 1 then
      return tenant, tonumber(at)
    end
    redis.call('ZREM', turn('fair', model, line), tenant)
  end
end

-- Send waiting messages while there is room.
local function fill(model, line)
  local under_way = redis.call('SCARD', turn('sent', model, line))
  while under_way < args.window do
    local tenant, at = front(model, line)
    if not tenant then
      return
    end
    local job = read(redis.call('ZPOPMIN', turn('wait', model, line, tenant))[1])
    if job and job.state == 'queued' then
      -- The cost is known at acceptance. Tokens that are then not generated are not refunded: the
      -- user's `max_tokens` bounds the error.
      redis.call('ZADD', turn('fair', model, line), at + (job.cost or 1) / (limits_of(tenant).weight or 1), tenant)
      send(job)
      under_way = under_way + 1
    end
  end
end

-- A job's message is sent now if there is room and no job waits, else when its turn comes.
local function line_up(job)
  redis.call('SADD', 'ms:queues', job.model .. ':' .. job.line)
  local first, least = front(job.model, job.line)
  if not first and redis.call('SCARD', turn('sent', job.model, job.line)) < args.window then
    send(job)
    return
  end
  redis.call('ZADD', turn('fair', job.model, job.line), 'NX', least or 0, job.tenant)
  redis.call('ZADD', turn('wait', job.model, job.line, job.tenant), now, job.id)
  -- The job stays in `ms:live`, the set of unfinished jobs from which usage is counted, but the
  -- reaper leaves it alone.
  look_at_queued(job, math.huge)
  fill(job.model, job.line)
end

-- A job was accepted.
local function enter(job)
  tally_from_here(key('job', job.id))
  tally(key('job', job.id), job.tenant, 'jobs', 1)
  tally(key('job', job.id), '', 'queued', 1)
  tally_room(job, 1)
  line_up(job)
end

-- A job waits for the artifact store, without a message and outside the window: the reaper sends it when it is due.
local function shelve(job)
  job.shelved = '1'
  redis.call('HSET', key('job', job.id), 'shelved', job.shelved)
  look_at_queued(job, now + SHELVED_S)
end

-- A job that had begun is queued again: it is not made to wait a second time, except in another queue.
local function enter_again(job)
  tally(key('job', job.id), '', 'queued', 1)
  if job.handed_on then
    line_up(job)
    return
  end
  redis.call('SADD', 'ms:queues', job.model .. ':' .. job.line)
  if job.shelved then
    shelve(job)
  else
    send(job)
  end
end

-- A job has left the queue: send the next one.
local function leave(job)
  tally(key('job', job.id), '', 'queued', -1)
  if redis.call('SREM', turn('sent', job.model, job.line), job.id) == 0 then
    job.unsent = redis.call('ZREM', turn('wait', job.model, job.line, job.tenant), job.id) == 1
  end
  fill(job.model, job.line)
end
