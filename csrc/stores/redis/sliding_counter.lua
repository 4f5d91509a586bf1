-- Sliding counter (3). Value: index of the window, its units, those of the window before.
local function counter_back(found, cost, taken_at)
    if taken_at == found.index then
        found.current = found.current > cost and found.current - cost or 0
    elseif taken_at == found.index - 1 then
        found.previous = found.previous > cost and found.previous - cost or 0
    end
end

local function counter_at(key, now, rule)
    local raw = call('GET', key)
    local period = rule.period
    if not raw then
        local into = now % period
        return { index = (now - into) / period, into = into, current = 0, previous = 0 }, ''
    end
    local known, current, previous = unpack('<ddd', raw)
    if #raw > 24 then rule.leases, raw = raw:sub(25), raw:sub(1, 24) end
    if now < known * period then now = known * period end -- a clock that goes back: the start of the window it was in
    local into = now % period
    local index = (now - into) / period
    if index == known + 1 then
        current, previous = 0, current
    elseif index > known then
        current, previous = 0, 0
    end
    local found = { index = index, into = into, current = current, previous = previous }
    if lapse(rule, found, counter_back) then raw = pack('<ddd', index, found.current, found.previous) end
    return found, raw
end

local function counter_store(key, now, rule, index, current, previous)
    local windows = current > 0 and 2 or previous > 0 and 1 or 0
    call('SET', key, pack('<ddd', index, current, previous) .. (rule.leases or ''), 'PX', expiry((index + windows) * rule.period - now))
end

local function counter_look(key, now, rule)
    local found, raw = counter_at(key, now, rule)
    local current, previous = found.current, found.previous
    if rule.charged then -- the window may have turned since
        local rest = rule.cost - current
        current = current - rule.cost
        if rest > 0 then current, previous = 0, previous > rest and previous - rest or 0 end
    end
    local weight, part = divide(previous, rule.period - found.into, rule.period)
    if part > 0 then weight = weight + 1 end
    return rule.cost == 0 or rule.forced or current + weight + rule.cost <= rule.limit, found, raw
end

local function counter_take(key, now, rule, found)
    local cost = cost_taken(rule, found.current, held_max)
    counter_store(key, now, rule, found.index, found.current + cost, found.previous)
end

local look, take = counter_look, counter_take
