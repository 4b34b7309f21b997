-- Hits of policies, for review. Here and not in the package that shows them: they are written in the commit of the receipt that reports
-- them, whatever is installed there. `policy`: model:name
--   ms:policy-hits:{policy}      zset: ids of its hits (job_request), by time
--   ms:policy-unmarked:{policy}  zset: those of them that have no mark
--   ms:policy-hit:{policy}:{id}  hash: a hit: at, tenant, hit (packed), text (packed tokens around it), mark (JSON)
--   ms:policy-texts:{job}        set: keys of the job's hits that have a text

local HITS_DROPPED = 100 -- at once, where the operator keeps fewer than before

local function hit_lists(policy)
  return key('policy-hits', policy), key('policy-unmarked', policy)
end

local function hit_key(policy, id)
  return key('policy-hit', policy .. ':' .. id)
end

-- Keep a hit: the newest `hits_kept` without a mark, for `hits_ttl` seconds. A later attempt at the prompt keeps that of the first.
local function keep_hit(job, request, policy, hit, text)
  if not hit then
    return
  end
  policy = job.model .. ':' .. policy
  local id = job.id .. '_' .. request
  local record, all, unmarked = hit_key(policy, id), hit_lists(policy)
  if redis.call('EXISTS', record) == 1 then
    return
  end
  redis.call('HSET', record, 'at', args.at, 'tenant', job.tenant, 'hit', hit)
  if text then
    local texts = key('policy-texts', job.id)
    redis.call('HSET', record, 'text', text)
    redis.call('SADD', texts, record)
    redis.call('EXPIRE', texts, args.hits_ttl)
  end
  redis.call('EXPIRE', record, args.hits_ttl)
  for _, list in ipairs({all, unmarked}) do
    redis.call('ZADD', list, args.at, id)
    redis.call('ZREMRANGEBYSCORE', list, '-inf', '(' .. string.format('%.6f', now - args.hits_ttl))
  end
  local over = math.min(redis.call('ZCARD', unmarked) - args.hits_kept, HITS_DROPPED)
  for _, old in ipairs(over > 0 and redis.call('ZRANGE', unmarked, 0, over - 1) or {}) do
    redis.call('DEL', hit_key(policy, old))
    redis.call('ZREM', all, old)
    redis.call('ZREM', unmarked, old)
  end
end

-- Forget all hits of a policy.
local function drop_hits(policy)
  local all, unmarked = hit_lists(policy)
  for _, id in ipairs(redis.call('ZRANGE', all, 0, -1)) do
    redis.call('DEL', hit_key(policy, id))
  end
  redis.call('DEL', all, unmarked)
end

-- Forget the texts of a job's hits.
local function drop_texts(job)
  local texts = key('policy-texts', job)
  for _, record in ipairs(redis.call('SMEMBERS', texts)) do
    redis.call('HDEL', record, 'text')
  end
  redis.call('DEL', texts)
end
