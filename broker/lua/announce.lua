-- Webhooks: what a change of state puts into the outbox, in the same commit. Included above the prelude, which calls it.

-- `job` has just entered its state.
local function announce(job)
end
