-- Phase two of a change of global steering: the proposal becomes the desired state.
-- args: model, id (of the proposal)
-- returns {'gone'} (no longer open) | {'committed', packed steering}
local model, id = args.model, args.id
local state = key('steering', model)
local open, version, deadline, steering =
  unpack(redis.call('HMGET', state, 'proposal_id', 'proposal_version', 'proposal_deadline', 'proposed'))
if redis.call('HGET', state, 'committed_id') == id then -- a repeat: the reply was lost
  return {'committed', redis.call('HGET', state, 'current')}
end
if open ~= id or tonumber(deadline) <= now then
  return {'gone'}
end
hand_over('proposal:' .. model, 'global:' .. model)
close_proposal(state)
redis.call('HSET', state, 'current', steering, 'global_version', version, 'committed_id', id, 'current_by', VERSION)
redis.call('HINCRBY', state, 'version', 1)
return {'committed', steering}
