-- Fixed window (1). Value: count, start, aligned or not. `option` is 1 for an aligned rule; the server's clock is
-- UTC. A window of the other kind has ended: in other stores the two are read from clocks that lie decades apart.
--
-- What is counted now, the start of the window (nil: none runs), and now.
local function fixed_now(raw, now, period, option)
    local count, start, kind = unpack('<ddB', raw)
    if kind ~= option then return 0, nil, now end
    if now < start then now = start end -- a clock that goes back grants nothing
    if now - start < period then return count, start, now end
    return 0, nil, now
end

local function fixed_start(now, period, option)
    if option ~= 1 then return now end
    local phase = period % 604800000000 == 0 and 345600000000 or 0 -- weeks begin on Monday 5 January 1970
    return now - (now - phase) % period
end

local function fixed_store(key, now, period, option, count, start, leases)
    local value = pack('<ddB', count, start, option)
    call('SET', key, leases and value .. leases or value, 'PX', expiry(start + period - now, leases))
end
