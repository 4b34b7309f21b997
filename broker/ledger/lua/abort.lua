-- A proposal is given up.
-- args: model, proposal id
-- returns 'gone' | 'aborted'
local model, id = unpack(ARGV, FIRST, FIRST + 1)
local state = key('steering', model)
if redis.call('HGET', state, 'proposal_id') ~= id then
  return 'gone'
end
pin('proposal:' .. model, 0, 0)
close_proposal(state)
redis.call('HINCRBY', state, 'version', 1)
return 'aborted'
