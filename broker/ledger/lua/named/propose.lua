-- Phase one of a change of global steering: ask the workers to prepare it.
-- args: model, id, version, deadline, proposal (packed), steering (of it, packed), tensors: {sha256, bytes or false} of each
-- returns {'busy'} (another one is open) | {'raced'} (a later number was committed) | {'missing', sha256} | {'proposed'}
local model, id = args.model, args.id
local state = key('steering', model)
local open_id, open = unpack(redis.call('HMGET', state, 'proposal_id', 'proposal_deadline'))
if open_id == id then -- a repeat: the reply was lost
  return {'proposed'}
end
if open and tonumber(open) > now then
  return {'busy'}
end
if tonumber(redis.call('HGET', state, 'global_version') or '0') >= args.version then
  return {'raced'}
end
local missing = pin('proposal:' .. model, args.tensors)
if missing then
  return {'missing', missing}
end
redis.call('HSET', state, 'proposal_id', id, 'proposal_version', args.version, 'proposal_deadline', args.deadline,
  'proposal', args.proposal, 'proposed', args.steering, 'proposal_by', VERSION)
redis.call('HINCRBY', state, 'version', 1)
return {'proposed'}
