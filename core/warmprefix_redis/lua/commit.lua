-- Record the blocks that a plan sent in full, because the model saw its prompt. Returns 1 if they were recorded.

local max_blocks = request.max_blocks
local slack = max_blocks < 64 and 0 or math.floor(max_blocks / 8)  -- excess that is worth reading the whole hash

-- Drop the oldest beyond the bounds. A label outlives its block's record, because the history may still show the text
-- that it names. A block never outlives its label.
local function trim(state)
  local hash, blocks, labels, named, dropped = redis.call('HGETALL', key), {}, {}, {}, {}
  for i = 1, #hash, 2 do
    local field, value = hash[i], hash[i + 1]
    if sub(field, 1, 1) == 'b' then
      local _, number, _, label = read_block(field, value)
      blocks[#blocks + 1] = {number or 0, field, label}
    elseif sub(field, 1, 1) == 'l' then
      labels[#labels + 1] = {tonumber(string.match(value, '^%d+')) or 0, field}
    end
  end
  local function older(one, other) return one[1] < other[1] end
  table.sort(blocks, older)
  table.sort(labels, older)
  for i, block in ipairs(blocks) do
    if i <= #blocks - max_blocks then dropped[#dropped + 1] = block[2] else named['l' .. (block[3] or '')] = true end
  end
  state.blocks = #blocks - #dropped
  local excess = #labels - 4 * max_blocks
  state.labels = #labels
  for _, label in ipairs(labels) do
    if excess > 0 and not named[label[2]] then
      dropped[#dropped + 1], excess, state.labels = label[2], excess - 1, state.labels - 1
    end
  end
  call('HDEL', dropped)
end

local state = load()
if not state then
  redis.call('UNLINK', key)  -- of another version, which must not trust it although this plan contradicts it
  return 0
end
if has_ended(state, request.plan) then
  save(state)
  return 0
end
local lease = end_plan(state, request.plan)
local is_next = lease and lease[2] == state.turn and now() < lease[3]
if not is_next then  -- late or not, the model saw it: the history may lack plans prepared in parallel
  roll_back(state, lease and lease[2] or 0)
end
take(state, is_next and state.turn + 1 or nil)
state.turn = state.turn + 1
if state.blocks > max_blocks + slack or state.labels > 4 * (max_blocks + slack) then trim(state) end
save(state)
return is_next and 1 or 0
