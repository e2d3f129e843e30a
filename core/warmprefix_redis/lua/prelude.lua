-- The beginning of every script. Times are milliseconds of the server's clock.
--
-- KEYS[1]  the hash of one conversation:
--   state           JSON: epoch, turn, the last number given, counts of blocks and labels, the server's identity,
--                   leases {plan, turn (-1: ended by forget), end of its time}, and the plans that ended most recently
--   b<fingerprint>  a block: turn, number, tokens, label
--   l<label>        number, fingerprint of the block that it names; no fingerprint if it names two
--   The values of state and blocks begin with a checksum: anything may write to the key, and a wrong label refers to
--   nothing. The numbers show which values are the oldest.
-- ARGV[1]  the request as JSON; ARGV[2] a checksum, because bytes may be lost or swapped on the way

local VERSION, ENDED = '1', -1
local PART = 4000  -- arguments of one command: Lua's stack holds no more than about 8,000
local key, sub = KEYS[1], string.sub

local function seal(text)
  return sub(redis.sha1hex(text), 1, 16)
end

if seal(key .. ARGV[1]) ~= ARGV[2] then
  return redis.error_reply('WARMPREFIX the request was damaged')
end
local request = cjson.decode(ARGV[1])

-- Call a command with any number of arguments; return the sum of its counts, or all of its values.
local function call(command, arguments)
  local count, values = 0, {}
  for first = 1, #arguments, PART do
    local answer = redis.call(command, key, unpack(arguments, first, math.min(first + PART - 1, #arguments)))
    if type(answer) == 'number' then count = count + answer else
      for _, value in ipairs(answer) do values[#values + 1] = value end
    end
  end
  return count, values
end

local function now()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Put a checksum in front of a value, and remove it. A value that is missing, damaged or of another version is nil.
local function checked(field, text)
  return sub(redis.sha1hex(VERSION .. field .. text), 1, 8) .. text
end

local function unchecked(field, value)
  local text = value and sub(value, 9)
  if text and checked(field, text) == value then return text end
end

-- Return turn, number, tokens and label; nothing if the value is damaged.
local function read_block(field, value)
  local turn, number, tokens, label = string.match(unchecked(field, value) or '', '^(%d+) (%d+) (%d+) (.*)$')
  return tonumber(turn), tonumber(number), tonumber(tokens), label
end

-- Forget every block recorded after a turn, and every damaged one. It starts with a deletion (which `save` repairs),
-- because Redis does not stop a script for lack of memory once it has written: a roll-back must never fail for that.
local function roll_back(state, turn)
  redis.call('HDEL', key, 'state')
  state.epoch = state.epoch + 1
  if state.blocks == 0 then return end
  local hash, late = redis.call('HGETALL', key), {}
  for i = 1, #hash, 2 do
    if sub(hash[i], 1, 1) == 'b' and (read_block(hash[i], hash[i + 1]) or turn + 1) > turn then
      late[#late + 1] = hash[i]
    end
  end
  state.blocks = math.max(state.blocks - call('HDEL', late), 0)
end

-- Forget everything. The leases are kept, because their plans may still be committed, which rolls back later turns.
local function forget(state)
  roll_back(state, 0)
  for _, lease in ipairs(state.leases) do lease[2] = ENDED end
end

-- Return the state; nil if there is none, and then also whether the key has other values. A server has a new identity
-- whenever it starts or becomes the primary. It may hold an older copy of the data, in which the last forget is missing.
local function load()
  local server = string.match(redis.call('INFO', 'replication'), 'master_replid:(%w+)') or ''
  local new = {epoch = 0, turn = 0, number = 0, blocks = 0, labels = 0, server = server, leases = {}, ended = {}}
  local values = redis.pcall('HMGET', key, 'state')
  if values.err and not string.find(values.err, 'WRONGTYPE', 1, true) then error(values.err, 0) end
  local text = unchecked('state', values[1])
  if not text then return nil, new, redis.call('EXISTS', key) == 1 end
  local state = cjson.decode(text)
  if state.server ~= server then
    forget(state)
    state.server = server
  end
  return state
end

local function save(state)
  redis.call('HSET', key, 'state', checked('state', cjson.encode(state)))
  redis.call('PEXPIRE', key, request.ttl)
end

local function has_ended(state, plan)
  for _, ended in ipairs(state.ended) do
    if ended == plan then return true end
  end
  return false
end

-- End a plan; return its lease, or nil.
local function end_plan(state, plan)
  if not has_ended(state, plan) then state.ended[#state.ended + 1] = plan end
  if #state.ended > request.max_leases then table.remove(state.ended, 1) end
  for i, lease in ipairs(state.leases) do
    if lease[1] == plan then return table.remove(state.leases, i) end
  end
end

-- Take the labels of sent blocks, and record the blocks themselves as those of a turn, if there is one. A label that two
-- parallel plans gave to two texts has no owner any more.
local function take(state, turn)
  local names, blocks, labels, owners = {}, {}, {}, {}
  for i, block in ipairs(request.sent) do names[i] = 'l' .. block[2] end
  local _, values = call('HMGET', names)
  for i, block in ipairs(request.sent) do
    local fingerprint, label, tokens = block[1], block[2], block[3]
    state.number = state.number + 1
    if turn then
      local field = 'b' .. fingerprint
      blocks[#blocks + 1] = field
      blocks[#blocks + 1] = checked(field, turn .. ' ' .. state.number .. ' ' .. tokens .. ' ' .. label)
    end
    local owner = owners[label] or (values[i] and (string.match(values[i], ' (%x*)$') or '')) or fingerprint
    owners[label] = owner == fingerprint and owner or ''
    labels[#labels + 1] = names[i]
    labels[#labels + 1] = state.number .. ' ' .. owners[label]
  end
  state.blocks = state.blocks + call('HSET', blocks)
  state.labels = state.labels + call('HSET', labels)
end
