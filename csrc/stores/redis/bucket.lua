-- Token bucket (4) and leaky bucket (5). Value: whole units in the bucket, a rest in parts of 1/period, and when. Units
-- that were used, not time owed: a changed limit or burst then finds what it needs, and nothing is rounded.
local function drained(rule, units, rest, passed)
    local period = rule.period
    local over = passed % period
    local gone = (passed - over) / period * rule.limit -- may lose digits, but only far above any number of units
    if gone > units then return 0, 0 end
    local more, part = divide(over, rule.limit, period)
    units, rest = units - gone - more, rest - part
    if rest < 0 then units, rest = units - 1, rest + period end
    if units < 0 then units, rest = 0, 0 end
    return units, rest
end

-- Also of the numbers as they were left: what has drained since drains by the rule of then.
local function bucket_back(found, cost)
    found.units, found.left = found.units - cost, found.left - cost
    if found.units < 0 then found.units, found.rest = 0, 0 end
    if found.left < 0 then found.left, found.left_rest = 0, 0 end
end

local function bucket_at(key, now, rule)
    local raw = call('GET', key)
    if not raw then return { now = now, units = 0, rest = 0 }, '' end
    local left, left_rest, at = unpack('<ddd', raw)
    if #raw > 24 then rule.leases, raw = raw:sub(25), raw:sub(1, 24) end
    if now < at then now = at end -- a clock that goes back grants nothing
    local units, rest = drained(rule, left, left_rest, now - at)
    local found = { now = now, units = units, rest = rest, left = left, left_rest = left_rest, left_at = at }
    if lapse(rule, found, bucket_back) then raw = pack('<ddd', found.left, found.left_rest, at) end
    return found, raw
end

local function bucket_store(key, now, rule, at, units, rest)
    local drained = (units * rule.period + rest) / rule.limit -- rounding is below the millisecond that expiry() adds
    call('SET', key, pack('<ddd', units, rest, at) .. (rule.leases or ''), 'PX', expiry(at - now + drained))
end

local function bucket_look(key, now, rule)
    local found, raw = bucket_at(key, now, rule)
    local units, rest = found.units, found.rest
    if rule.charged then
        units = units - rule.cost
        if units < 0 then units, rest = 0, 0 end
    end
    if rule.cost == 0 or rule.forced then return true, found, raw end
    if rule.patience > 0 then
        local held = units + rule.cost
        if rule.cost > rule.burst or held > held_max or held == held_max and rest > 0 then return false, found, raw end
        -- Whether its turn has come when it has lost patience: in a leaky bucket all before it must have left.
        units, rest = drained(rule, units, rest, rule.patience)
        if rule.algorithm == 5 then return units == 0 and rest == 0, found, raw end
    end
    units = units + rule.cost
    return units < rule.burst or units == rule.burst and rest == 0, found, raw
end

local function bucket_take(key, now, rule, found)
    local units, rest = found.units + rule.cost, found.rest
    if rule.forced and units >= held_max then units, rest = held_max, 0 end
    bucket_store(key, now, rule, found.now, units, rest)
end

local look, take = bucket_look, bucket_take
