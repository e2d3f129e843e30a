-- Return a plan's lease. Returns 1 if there was one.

local state = load()
if not state then return 0 end
local lease = end_plan(state, request.plan)
if lease then redis.call('HDEL', key, 'state') end  -- as in roll_back: this must not fail when memory is full
save(state)
return lease and lease[2] ~= ENDED and 1 or 0
