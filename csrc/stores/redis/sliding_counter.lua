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

look[3] = function(key, now, rule)
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

take[3] = function(key, now, rule, found)
    local cost = cost_taken(rule, found.current, held_max)
    counter_store(key, now, rule, found.index, found.current + cost, found.previous)
end

knock[3] = function(key, now, rule, found)
    counter_store(key, now, rule, found.index, held_denied(found.current, rule.limit, rule.cost), found.previous)
end

give[3] = function(key, now, rule)
    local found = counter_at(key, now, rule)
    local cost, current, previous = rule.cost, found.current, found.previous
    if current == 0 and previous == 0 then return end -- fresh: a state that may as well be gone learns no time
    if not rule.own or rule.stamp == found.index - 1 then
        local given = cost < previous and cost or previous
        previous, cost = previous - given, cost - given
    end
    if not rule.own or rule.stamp == found.index then
        current = current - (cost < current and cost or current)
    end
    counter_store(key, now, rule, found.index, current, previous)
end

stamp[3] = function(_, found) return found.index end

save[3] = function(key, now, rule, found)
    counter_store(key, now, rule, found.index, found.current, found.previous)
end

back[3] = function(key, now, rule, found)
    counter_back(found, rule.cost, rule.stamp)
    save[3](key, now, rule, found)
end
