-- Mark every block as unseen, because the history was changed, and end every lease. The leases are kept, because their
-- plans may still be committed, which rolls back later turns.

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
