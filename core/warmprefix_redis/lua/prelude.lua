-- The beginning of every script. Numbers are big-endian, times are milliseconds of the server's clock.
--
-- KEYS[1]  the hash of one conversation:
--   m               the record: format, epoch, turn, last sequence number, count of blocks, count of labels; checksum of
--                   these, `p` and `c`
--   p               plans in flight, oldest first: turn (-1: ended by forget), end of the lease, length of the id, id
--   c               digests of the plans that ended most recently
--   b<fingerprint>  a block: sequence number, turn, tokens, length of the label; checksum of the field's name, these
--                   and the label; label
--   l<label>        sequence number, fingerprint of the block that it names; no fingerprint if it names two
-- ARGV[1]  bounds: blocks, plans in flight, time to live, time of a lease
-- ARGV[2]  a plan's id, ARGV[3] its digest
-- ARGV[4]  the fields of each block and its label, a msgpack array
-- ARGV[#ARGV]  a checksum of all of these, because bytes may be lost or swapped on the way

local FORMAT, RECORD, RECORD_SIZE = 1, '>BI4I4I4I4I4', 21
local BLOCK_SIZE, CHECK_SIZE = 16, 8
local LEASE, LEASE_SIZE, ENDED = '>i4I8I4', 16, -1
local PART = 4000  -- arguments of one command: Lua's stack holds no more than about 8,000
local key, sub = KEYS[1], string.sub
local max_blocks, max_leases, ttl, lease_ttl = struct.unpack('>I4I4I8I8', ARGV[1])

local function seal(text)
  return sub(redis.sha1hex(text), 1, 16)
end

-- Run a script's body. An error of Redis reaches the client with its own code, such as READONLY or OOM: so it is raised
-- in a table, which Redis does not interpret.
local function run(body)
  if seal(table.concat(ARGV, '', 1, #ARGV - 1) .. key) ~= ARGV[#ARGV] then
    return redis.error_reply('WARMPREFIX the request was damaged')
  end
  local ok, answer = pcall(body)
  if ok then return answer end
  if type(answer) ~= 'table' then error(answer, 0) end
  return redis.error_reply((string.gsub(answer.reason, '^@user_script: ?%d+: %-?', '')))
end

local function call(...)
  local answer = redis.pcall(...)
  if type(answer) == 'table' and answer.err then error({reason = answer.err}) end
  return answer
end

-- Call HSET or HDEL with any number of arguments; return the number of fields added or removed.
local function call_in_parts(command, arguments)
  local count = 0
  for first = 1, #arguments, PART do
    count = count + call(command, key, unpack(arguments, first, math.min(first + PART - 1, #arguments)))
  end
  return count
end

-- Return the checksum of a stored value: anything may write to the key, and a wrong label refers to nothing.
local function checksum(text)
  return sub(redis.sha1hex(text), 1, CHECK_SIZE)
end

-- Join the numbers of a block and its label.
local function pack_block(field, numbers, label)
  return numbers .. checksum(field .. numbers .. label) .. label
end

local function is_whole_block(field, value)
  return value == pack_block(field, sub(value, 1, BLOCK_SIZE), sub(value, BLOCK_SIZE + CHECK_SIZE + 1))
end

local function now()
  local time = call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function read_leases(packed)
  local leases, at = {}, 1
  while at <= #packed do
    local turn, ends, length = struct.unpack(LEASE, packed, at)
    at = at + LEASE_SIZE + length
    leases[#leases + 1] = {turn = turn, ends = ends, plan = sub(packed, at - length, at - 1)}
  end
  return leases
end

-- Return the conversation's state, and the values of further fields, from the fourth element on. Return nil if it is
-- missing or damaged; nil and true if it is of another version.
local function load(fields)
  local values = redis.pcall('HMGET', key, 'm', 'p', 'c', unpack(fields, 1, math.min(#fields, PART)))
  if values.err then
    if string.find(values.err, 'WRONGTYPE', 1, true) then return nil end
    error({reason = values.err})
  end
  local record, leases, ended = values[1], values[2], values[3]
  if record and record ~= '' and string.byte(record) ~= FORMAT then return nil, true end
  if not (record and leases and ended) or #record ~= RECORD_SIZE + CHECK_SIZE then return nil end
  if sub(record, RECORD_SIZE + 1) ~= checksum(sub(record, 1, RECORD_SIZE) .. leases .. ended) then return nil end
  for first = PART + 1, #fields, PART do
    local more = call('HMGET', key, unpack(fields, first, math.min(first + PART - 1, #fields)))
    for i = 1, #more do values[#values + 1] = more[i] end
  end
  local _, epoch, turn, last, blocks, labels = struct.unpack(RECORD, record)
  return {
    epoch = epoch, turn = turn, last = last, blocks = blocks, labels = labels,
    leases = read_leases(leases), ended = ended, stored_ended = ended,
  }, values
end

-- Remove an unreadable record, so that no other version trusts it although this plan contradicts it; return 1 if there was
-- one.
local function discard()
  return call('EXISTS', key) == 1 and call('UNLINK', key) or 0
end

-- Write the state, and further fields and values with it.
local function save(state, items)
  local leases = {}
  for i, lease in ipairs(state.leases) do
    leases[i] = struct.pack(LEASE, lease.turn, lease.ends, #lease.plan) .. lease.plan
  end
  local record = struct.pack(RECORD, FORMAT, state.epoch, state.turn, state.last, state.blocks, state.labels)
  local packed, n = table.concat(leases), #items
  items[n + 1], items[n + 3] = 'm', 'p'
  items[n + 2], items[n + 4] = record .. checksum(record .. packed .. state.ended), packed
  if state.ended ~= state.stored_ended then items[n + 5], items[n + 6] = 'c', state.ended end
  call_in_parts('HSET', items)
  call('PEXPIRE', key, ttl)
end

local function has_ended(state, digest)
  local at = string.find(state.ended, digest, 1, true)
  while at and at % 16 ~= 1 do at = string.find(state.ended, digest, at + 1, true) end
  return at ~= nil
end

-- End a plan; return its lease, or nil.
local function end_plan(state, plan, digest)
  state.ended = sub(state.ended .. digest, -16 * max_leases)
  for i, lease in ipairs(state.leases) do
    if lease.plan == plan then return table.remove(state.leases, i) end
  end
end

local function turn_of(block)
  return (struct.unpack('>I4', block, 5))
end

-- Forget every block recorded after a turn, and every damaged one. It starts with a deletion (which `save` repairs), because Redis does not
-- stop a script for lack of memory once it has written: a roll-back must never fail for that.
local function roll_back(state, turn)
  call('HDEL', key, 'p')
  state.epoch = state.epoch + 1
  if state.blocks == 0 then return end
  local hash, late = call('HGETALL', key), {}
  for i = 1, #hash, 2 do
    local field, value = hash[i], hash[i + 1]
    if sub(field, 1, 1) == 'b' and not (is_whole_block(field, value) and turn_of(value) <= turn) then
      late[#late + 1] = field
    end
  end
  state.blocks = math.max(state.blocks - call_in_parts('HDEL', late), 0)
end
