-- The history is no longer what was recorded: nothing is seen any more, and every lease ends. The plans may still be
-- committed, and would take back what comes later; so they are kept.

return run(function()
  local state = load({})
  if not state then
    discard()
    return 0
  end
  roll_back(state, 0)
  for _, lease in ipairs(state.leases) do lease.turn = ENDED end
  save(state, {})
  return 1
end)
