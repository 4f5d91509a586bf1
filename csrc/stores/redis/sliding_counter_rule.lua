-- Sliding counter under any rule.
local function counter_back(found, cost, taken_at)
    if taken_at == found.index then
        found.current = found.current > cost and found.current - cost or 0
    elseif taken_at == found.index - 1 then
        found.previous = found.previous > cost and found.previous - cost or 0
    end
end

local function counter_at(key, now, rule)
    local raw = call('GET', key)
    if raw and #raw > 24 then rule.leases, raw = raw:sub(25), raw:sub(1, 24) end
    local index, into, current, previous = counter_now(raw, now, rule.period)
    local found = { index = index, into = into, current = current, previous = previous }
    if lapse(rule, found, counter_back) then raw = pack('<ddd', index, found.current, found.previous) end
    return found, raw or ''
end

local function counter_write(key, now, rule, index, current, previous)
    counter_store(key, now, rule.period, index, current, previous, rule.leases)
end

local function counter_look(key, now, rule)
    local found, raw = counter_at(key, now, rule)
    local current, previous = found.current, found.previous
    if rule.charged then -- the window may have turned since
        local rest = rule.cost - current
        current = current - rule.cost
        if rest > 0 then current, previous = 0, previous > rest and previous - rest or 0 end
    end
    local counted = current + counter_weight(previous, found.into, rule.period)
    return rule.cost == 0 or rule.forced or counted + rule.cost <= rule.limit, found, raw
end

local function counter_take(key, now, rule, found)
    local cost = cost_taken(rule, found.current, held_max)
    counter_write(key, now, rule, found.index, found.current + cost, found.previous)
end

local look, take = counter_look, counter_take
