-- Token bucket and leaky bucket under any rule.
--
-- Also of the numbers as they were left: what has drained since drains by the rule of then.
local function bucket_back(found, cost)
    found.units, found.left = found.units - cost, found.left - cost
    if found.units < 0 then found.units, found.rest = 0, 0 end
    if found.left < 0 then found.left, found.left_rest = 0, 0 end
end

local function bucket_at(key, now, rule)
    local raw = call('GET', key)
    if not raw then return { now = now, units = 0, rest = 0 }, '' end
    if #raw > 24 then rule.leases, raw = raw:sub(25), raw:sub(1, 24) end
    local units, rest, at = bucket_now(raw, now, rule.limit, rule.period)
    local left, left_rest, left_at = unpack('<ddd', raw)
    local found = { now = at, units = units, rest = rest, left = left, left_rest = left_rest, left_at = left_at }
    if lapse(rule, found, bucket_back) then raw = pack('<ddd', found.left, found.left_rest, left_at) end
    return found, raw
end

local function bucket_write(key, now, rule, units, rest, at)
    bucket_store(key, now, rule.limit, rule.period, units, rest, at, rule.leases)
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
        if rule.cost > rule.burst or not bucket_holds(held_max, held, rest) then return false, found, raw end
        -- Whether its turn has come when it has lost patience: in a leaky bucket all before it must have left.
        units, rest = drained(rule.limit, rule.period, units, rest, rule.patience)
        if rule.algorithm == 5 then return units == 0 and rest == 0, found, raw end
    end
    return bucket_holds(rule.burst, units + rule.cost, rest), found, raw
end

local function bucket_take(key, now, rule, found)
    local units, rest = found.units + rule.cost, found.rest
    if rule.forced and units >= held_max then units, rest = held_max, 0 end
    bucket_write(key, now, rule, units, rest, found.now)
end

local look, take = bucket_look, bucket_take
