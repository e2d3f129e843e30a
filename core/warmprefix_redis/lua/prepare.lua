-- Lease the next turn to a plan, and return what the history contains of the proposed blocks.
--
-- ARGV[5]  '1' to return the server's uptime
--
-- Returns the server's uptime in seconds, whether it was ever promoted (1) and whether values were unreadable (2), the
-- length of its identity and the turn; the identity; one byte per block; the values of the seen blocks; and a checksum of
-- all that and the plan's id.

local UNKNOWN, SEEN, SEEN_CONTESTED, TAKEN = '\0', '\1', '\3', '\4'

-- Return the value of a line of INFO. (Patterns would be slow.)
local function line_of(info, name)
  local _, last = string.find(info, name .. ':', 1, true)
  return last and sub(info, last + 1, string.find(info, '\r', last, true) - 1) or ''
end

-- Return the server's identity: a master gets a new one whenever it starts or is promoted. A server with another one
-- than before may lack the last writes.
local function describe_server()
  local replication = call('INFO', 'replication')
  local promoted = string.find(line_of(replication, 'master_replid2'), '[1-9a-f]') and 1 or 0
  local uptime = ARGV[5] == '1' and tonumber(line_of(call('INFO', 'server'), 'uptime_in_seconds')) or 0
  return math.max(uptime, 0), promoted, line_of(replication, 'master_replid')
end

-- Take a lease for the plan, unless it has ended already, and end the leases that timed out or exceed the bound.
-- Whether the model saw those plans is unknown. If others were committed meanwhile, everything since then is in doubt: returns
-- the last turn that is not.
local function take_lease(state, plan, digest)
  local time, held, kept = now(), {}, state.turn
  local own = {turn = state.turn, ends = time + lease_ttl, plan = plan}
  for _, lease in ipairs(state.leases) do
    if lease.plan == plan then
      held[#held + 1], own = own, nil
    elseif lease.ends <= time and lease.turn < state.turn then
      kept = math.min(kept, lease.turn)
    else
      held[#held + 1] = lease
    end
  end
  if own and not has_ended(state, digest) then held[#held + 1] = own end
  while #held > max_leases do
    local lease = table.remove(held, 1)
    kept = math.min(kept, lease.turn)
  end
  state.leases = held
  return kept
end

return run(function()
  local plan, digest, fields = ARGV[2], ARGV[3], cmsgpack.unpack(ARGV[4])
  local state, values = load(fields)
  local damaged = 0
  if not state then
    local is_of_another_version = values
    damaged = 2 * discard()
    if is_of_another_version then damaged = 0 end
    state, values = {epoch = 0, turn = 0, last = 0, blocks = 0, labels = 0, leases = {}, ended = ''}, {}
  end

  local uptime, promoted, identity = describe_server()
  local kept = take_lease(state, plan, digest)
  if kept < state.turn then roll_back(state, kept) end
  save(state, {})

  local certain = state.turn  -- later turns may be rolled back by the commit of a plan prepared before them
  for _, lease in ipairs(state.leases) do
    if lease.plan ~= plan then certain = math.min(certain, lease.turn) end
  end
  local flags, seen, all_are_certain = {}, {}, math.min(kept, certain) == state.turn
  for i = 1, #fields, 2 do
    local block, label, flag = values[i + 3], values[i + 4], UNKNOWN
    if block and not is_whole_block(fields[i], block) then block, damaged = nil, 2 end
    if block and (all_are_certain or turn_of(block) <= kept) then
      flag = (all_are_certain or turn_of(block) <= certain) and SEEN or SEEN_CONTESTED
      seen[#seen + 1] = block
    elseif label and sub(label, 5) ~= sub(fields[i], 2) then
      flag = TAKEN
    end
    flags[#flags + 1] = flag
  end
  local answer = struct.pack('>I4BBI4', uptime, promoted + damaged, #identity, state.turn)
    .. identity .. table.concat(flags) .. table.concat(seen)
  return answer .. seal(answer .. plan)
end)
