-- Return a plan's lease. Returns 1 if there was one.

return run(function()
  local plan, digest = ARGV[2], ARGV[3]
  local state = load({})
  if not state then return 0 end
  if has_ended(state, digest) then
    call('PEXPIRE', key, ttl)
    return 0
  end
  local lease = end_plan(state, plan, digest)
  if lease then call('HDEL', key, 'p') end  -- as in roll_back: returning a lease must not fail when memory is full
  save(state, {})
  return lease and lease.turn ~= ENDED and 1 or 0
end)
