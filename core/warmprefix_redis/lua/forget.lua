-- Mark every block as unseen, because the history was changed or is uncertain, and end every lease.

local state, new, damaged = load()
if damaged then redis.call('UNLINK', key) end
if not state and #request.open == 0 and #request.sent == 0 then return 0 end
state = state or new
forget(state)
for _, plan in ipairs(request.ended) do end_plan(state, plan) end
local leased = {}
for _, lease in ipairs(state.leases) do leased[lease[1]] = true end
for _, plan in ipairs(request.open) do
  if not leased[plan] and not has_ended(state, plan) then state.leases[#state.leases + 1] = {plan, ENDED, now() + request.lease_ttl} end
end
while #state.leases > request.max_leases do table.remove(state.leases, 1) end
take(state, nil)
save(state)
return 1
