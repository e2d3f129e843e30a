-- Lease the next turn to a plan. Returns, behind a checksum of it and the plan, JSON: the turn, 1 if the record was
-- damaged, and of each proposed block 0 (unknown), 1 (its label is taken) or turn, tokens, label and 1 if contested.

local state, new, damaged = load()
if damaged then redis.call('UNLINK', key) end
state = state or new

-- End the leases that timed out or exceed the bound. Whether the model saw those plans is unknown. If others were
-- committed meanwhile, everything since then is in doubt.
local plan, time, leases, kept = request.plan, now(), {}, state.turn
for _, lease in ipairs(state.leases) do
  if lease[3] <= time and lease[2] < state.turn and lease[1] ~= plan then
    kept = math.min(kept, lease[2])
  elseif lease[1] ~= plan then
    leases[#leases + 1] = lease
  end
end
if not has_ended(state, plan) then leases[#leases + 1] = {plan, state.turn, time + request.lease_ttl} end
while #leases > request.max_leases do kept = math.min(kept, table.remove(leases, 1)[2]) end
state.leases = leases
if kept < state.turn then roll_back(state, kept) end
save(state)

local certain = state.turn  -- later turns may be rolled back by the commit of a plan prepared before them
for _, lease in ipairs(leases) do
  if lease[1] ~= plan then certain = math.min(certain, lease[2]) end
end
local _, values = call('HMGET', request.fields)
local found, is_damaged = {}, damaged and 1 or 0
for i = 1, #request.fields, 2 do
  local turn, _, tokens, label = read_block(request.fields[i], values[i])
  local owner = values[i + 1] and (string.match(values[i + 1], ' (%x*)$') or '')
  if values[i] and not turn then is_damaged = 1 end
  local is_taken = owner and owner ~= sub(request.fields[i], 2)
  if turn then
    local is_shared = is_taken and label == sub(request.fields[i + 1], 2)
    found[#found + 1] = {turn, tokens, label, (turn > certain or is_shared) and 1 or 0}
  else
    found[#found + 1] = is_taken and 1 or 0
  end
end
local answer = cjson.encode({state.turn, is_damaged, found})
return seal(plan .. answer) .. answer
