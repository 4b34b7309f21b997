-- Accept a job: record, blobs, listing and idempotency key in one commit.
-- args: id, spec, created, kind, model, prompts, asked, captures, steers, metadata, written_by, idempotency key, body sha256,
--       blob ttl, JSON list of the tags under which captures become files ('' for none), JSON of the named modules, cells of a sweep,
--       JSON of the source runs that it is patched with, name of the run that it makes ('' for none), that run, packed,
--       tenant, priority, when it expires ('' for never), JSON of its callback ('' for none),
--       then (sha256, bytes, '' to take what is pinned) per blob
-- returns {'created', id} | {'repeated', id of the first} | {'mismatch', id of the first} | {'exists', id} | {'missing', sha256}
local id, spec, created, kind, model, prompts, asked, captures, steers, metadata, written_by, idem, body, blob_ttl,
  tags, modules, cells, runs, run, packed_run, tenant, priority, expires, callback = unpack(ARGV, FIRST, FIRST + 23)
local BLOBS = FIRST + 24
if idem ~= '' then
  local first = redis.call('GET', key('idem', idem))
  if first then
    local first_id, first_body = string.match(first, '^([^:]+):(.*)$')
    if redis.call('EXISTS', key('job', first_id)) == 1 then
      if first_body ~= body then
        return {'mismatch', first_id}
      end
      return {first_id == id and 'created' or 'repeated', first_id}
    end
  end
end
local there = redis.call('HGET', key('job', id), 'spec')
if there then -- the same again: a client whose connection broke before it got the answer
  return {there == spec and 'created' or 'exists', id}
end
for at = BLOBS, #ARGV, 2 do
  if ARGV[at + 1] == '' and redis.call('EXISTS', key('pinned', ARGV[at]), key('blob', ARGV[at])) == 0 then
    return {'missing', ARGV[at]} -- its module was changed or taken away since it was looked up
  end
end
for at = BLOBS, #ARGV, 2 do -- the job's own copies: what becomes of a module is nothing to it
  local blob = key('blob', ARGV[at])
  if ARGV[at + 1] ~= '' then
    redis.call('SET', blob, ARGV[at + 1])
  elseif redis.call('EXISTS', blob) == 0 then
    redis.call('COPY', key('pinned', ARGV[at]), blob)
  end
  redis.call('EXPIRE', blob, blob_ttl)
end
redis.call('HSET', key('job', id), 'spec', spec, 'state', 'queued', 'attempt', 0, 'version', 1, 'created', created, 'queued', ARGV[1],
  'kind', kind, 'model', model, 'prompts', prompts, 'asked', asked, 'captures', captures, 'steers', steers, 'metadata', metadata,
  'modules', modules, 'cells', 0, 'cells_expected', cells, 'runs', runs, 'run', run,
  'tenant', tenant, 'priority', priority, 'written_by', written_by, 'receipts', 0, 'expected', 0, 'capture_status', captures == '1' and 'pending' or 'not_requested')
if expires ~= '' then
  redis.call('HSET', key('job', id), 'expires', expires)
end
if callback ~= '' then
  redis.call('HSET', key('job', id), 'callback', callback)
end
redis.call('ZADD', 'ms:jobs', created, id)
redis.call('ZADD', key('jobs', tenant), created, id) -- its tenant's own list
redis.call('SADD', 'ms:owners', tenant)
if tags ~= '' then -- outlives the job's record: files stay until they are deleted
  redis.call('HSET', key('capture', id), 'tags', tags, 'created', created, 'status', 'pending', 'bytes', 0, 'rows', 0, 'model', model,
    'tenant', tenant)
  redis.call('ZADD', 'ms:captures', created, id)
  redis.call('ZADD', key('captures', tenant), created, id)
end
if run ~= '' then -- from here on the name means this job, whatever it meant before
  redis.call('HSET', key('runs', model), run, packed_run)
end
if idem ~= '' then
  redis.call('SET', key('idem', idem), id .. ':' .. body, 'EX', result_ttl)
end
local job = read(id)
look_at(job, now + QUEUED_LOOK_S)
event(job, 'state', '{"state":"queued","attempt":0}')
redis.call('PUBLISH', key('changed', id), 1)
return {'created', id}
