-- Record the blocks that a plan sent in full, because the model saw its prompt. Returns 1 if they were recorded.
--
-- ARGV[5]  tokens of each block, 4 bytes each

-- Add the fields of the blocks, all of the new turn.
local function record_blocks(state, items, fields, values)
  local tokens, counted = ARGV[5], {}
  for i = 1, #fields, 2 do
    local field, label = fields[i], sub(fields[i + 1], 2)
    local own_tokens = sub(tokens, 2 * i - 1, 2 * i + 2)
    state.last = state.last + 1
    items[#items + 1] = field
    items[#items + 1] = pack_block(field, struct.pack('>I4I4c4I4', state.last, state.turn + 1, own_tokens, #label), label)
    if not (values[i + 3] or counted[field]) then
      counted[field], state.blocks = true, state.blocks + 1
    end
  end
end

-- Add the fields of their labels. A label that two parallel plans gave to two texts has no owner any more.
local function take_labels(state, items, fields, values)
  local owners = {}
  for i = 1, #fields, 2 do
    local fingerprint, field, value = sub(fields[i], 2), fields[i + 1], values[i + 4]
    if not (value or owners[field]) then state.labels = state.labels + 1 end
    local owner = owners[field] or (value and sub(value, 5)) or fingerprint
    owners[field] = owner == fingerprint and owner or ''
    state.last = state.last + 1
    items[#items + 1] = field
    items[#items + 1] = struct.pack('>I4', state.last) .. owners[field]
  end
end

-- Excess over the bounds that is worth reading the whole hash.
local slack = max_blocks < 64 and 0 or math.floor(max_blocks / 8)
local max_labels = 4 * max_blocks

-- Return the highest of the `few` lowest sequence numbers.
local function last_of_oldest(numbers, few)
  if few <= 0 then return 0 end
  table.sort(numbers)
  return numbers[math.min(few, #numbers)] or 0
end

-- Drop the oldest beyond the bounds. A label outlives its block's record, because the history may still show
-- the text that it names. A block never outlives its label.
local function trim(state)
  local hash, dropped, in_use = call('HGETALL', key), {}, {}

  local function each(kind, visit)
    for i = 1, #hash, 2 do
      local field, value = hash[i], hash[i + 1]
      if sub(field, 1, 1) == kind then visit(field, value, #value >= 4 and struct.unpack('>I4', value) or 0) end
    end
  end

  local numbers = {}
  each('b', function(_, _, number) numbers[#numbers + 1] = number end)
  local last = last_of_oldest(numbers, #numbers - max_blocks)
  each('b', function(field, value, number)
    if number <= last then dropped[#dropped + 1] = field else in_use['l' .. sub(value, BLOCK_SIZE + CHECK_SIZE + 1)] = true end
  end)
  state.blocks = #numbers - #dropped

  if state.labels > max_labels + 4 * slack then
    local unused, count = {}, 0
    each('l', function(field, _, number)
      count = count + 1
      if not in_use[field] then unused[#unused + 1] = number end
    end)
    last, state.labels = last_of_oldest(unused, count - max_labels), count
    each('l', function(field, _, number)
      if number <= last and not in_use[field] then
        dropped[#dropped + 1], state.labels = field, state.labels - 1
      end
    end)
  end
  call_in_parts('HDEL', dropped)
end

return run(function()
  local plan, digest, fields = ARGV[2], ARGV[3], cmsgpack.unpack(ARGV[4])
  local state, values = load(fields)
  if not state then
    discard()
    return 0
  end
  if has_ended(state, digest) then
    call('PEXPIRE', key, ttl)
    return 0
  end
  local lease, items = end_plan(state, plan, digest), {}
  local is_next = lease and lease.turn == state.turn and now() < lease.ends
  if is_next then
    record_blocks(state, items, fields, values)
  else  -- late or not, the model saw it: the history may lack plans prepared in parallel
    roll_back(state, lease and lease.turn or 0)
  end
  take_labels(state, items, fields, values)
  state.turn = state.turn + 1
  save(state, items)
  if state.blocks > max_blocks + slack or state.labels > max_labels + 4 * slack then
    trim(state)
    save(state, {})
  end
  return is_next and 1 or 0
end)
