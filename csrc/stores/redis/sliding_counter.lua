-- Sliding counter (3). Value: index of the window, its units, those of the window before.
--
-- The window of now, how far into it now is, its units and those of the one before.
local function counter_now(raw, now, period)
    local known, current, previous = 0, 0, 0
    if raw then
        known, current, previous = unpack('<ddd', raw)
        if now < known * period then now = known * period end -- a clock that goes back: the start of the window it was in
    end
    local into = now % period
    local index = (now - into) / period
    if index == known + 1 then return index, into, 0, current end
    if index > known then return index, into, 0, 0 end
    return index, into, current, previous
end

-- What of the window before still counts, rounded up.
local function counter_weight(previous, into, period)
    local weight, part = divide(previous, period - into, period)
    return part > 0 and weight + 1 or weight
end

local function counter_store(key, now, period, index, current, previous, leases)
    local windows = current > 0 and 2 or previous > 0 and 1 or 0
    local value = pack('<ddd', index, current, previous)
    call('SET', key, leases and value .. leases or value, 'PX', expiry((index + windows) * period - now, leases))
end
