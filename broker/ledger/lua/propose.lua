-- Phase one of a change of global steering: the workers are asked to prepare it.
-- args: model, proposal id, version, deadline, packed proposal, packed steering of it, number of tensors,
--       then (sha256, bytes or '') per tensor
-- returns {'busy'} (another one is open) | {'raced'} (a later number was committed) | {'missing', sha256} | {'proposed'}
local model, id, version, deadline, packed, steering, count = unpack(ARGV, FIRST, FIRST + 6)
local state = key('steering', model)
local open_id, open = unpack(redis.call('HMGET', state, 'proposal_id', 'proposal_deadline'))
if open_id == id then -- the same again: its answer was lost
  return {'proposed'}
end
if open and tonumber(open) > now then
  return {'busy'}
end
if tonumber(redis.call('HGET', state, 'global_version') or '0') >= tonumber(version) then
  return {'raced'}
end
local missing = pin('proposal:' .. model, FIRST + 7, tonumber(count))
if missing then
  return {'missing', missing}
end
redis.call('HSET', state, 'proposal_id', id, 'proposal_version', version, 'proposal_deadline', deadline, 'proposal', packed,
  'proposed', steering, 'proposal_by', VERSION)
redis.call('HINCRBY', state, 'version', 1)
return {'proposed'}
