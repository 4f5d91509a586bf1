-- Token bucket (4) and leaky bucket (5). Value: whole units in the bucket, a rest in parts of 1/period, and when. Units
-- that were used, not time owed: a changed limit or burst then finds what it needs, and nothing is rounded.
local function drained(limit, period, units, rest, passed)
    local over = passed % period
    local gone = (passed - over) / period * limit -- may lose digits, but only far above any number of units
    if gone > units then return 0, 0 end
    local more, part = divide(over, limit, period)
    units, rest = units - gone - more, rest - part
    if rest < 0 then units, rest = units - 1, rest + period end
    if units < 0 then return 0, 0 end
    return units, rest
end

-- What is in it now, and now.
local function bucket_now(raw, now, limit, period)
    local units, rest, at = unpack('<ddd', raw)
    if now < at then now = at end -- a clock that goes back grants nothing
    units, rest = drained(limit, period, units, rest, now - at)
    return units, rest, now
end

local function bucket_store(key, now, limit, period, units, rest, at, leases)
    local lasts = (units * period + rest) / limit -- rounding is below the millisecond that expiry() adds
    local value = pack('<ddd', units, rest, at)
    call('SET', key, leases and value .. leases or value, 'PX', expiry(at - now + lasts, leases))
end

local function bucket_holds(burst, units, rest)
    return units < burst or units == burst and rest == 0
end
