-- Abandon a proposal.
-- args: model, id (of the proposal)
-- returns 'gone' | 'aborted'
local state = key('steering', args.model)
if redis.call('HGET', state, 'proposal_id') ~= args.id then
  return 'gone'
end
pin('proposal:' .. args.model, {})
close_proposal(state)
redis.call('HINCRBY', state, 'version', 1)
return 'aborted'
