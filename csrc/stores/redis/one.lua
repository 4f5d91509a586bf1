-- Whether there is one rule and nothing special about the hit: not forced, charged already or waiting, counted only where it
-- fits. Its algorithm answers then, unless leases stand in the state.
local text = ARGV[2]
local _, _, flags, limit, burst, period, cost, option = unpack('<BBBddddd', text)
local one = flags == 0 and op < 2 and #text == 52 and #ARGV == 2
