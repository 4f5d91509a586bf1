-- Fixed window (1). Value: count, start, aligned or not. `option` is 1 for an aligned rule; the server's clock is
-- UTC. A window of the other kind has ended: in other stores the two are read from clocks that lie decades apart.
local function fixed_back(found, cost, taken_at, option)
    if found.start ~= taken_at or found.kind ~= option then return end
    found.count = found.count > cost and found.count - cost or 0
end

local function fixed_at(key, now, rule)
    local raw = call('GET', key)
    if not raw then return { now = now, count = 0 }, '' end
    local count, start, kind = unpack('<ddB', raw)
    if #raw > 17 then rule.leases, raw = raw:sub(18), raw:sub(1, 17) end
    local found = { now = now, count = 0, kind = kind }
    if kind == rule.option then
        if now < start then found.now = start end -- a clock that goes back grants nothing
        if found.now - start < rule.period then found.count, found.start = count, start end
    end
    if lapse(rule, found, fixed_back) and found.start then raw = pack('<ddB', found.count, start, kind) end
    return found, raw
end

local function fixed_start(now, rule)
    if rule.option ~= 1 then return now end
    local phase = rule.period % 604800000000 == 0 and 345600000000 or 0 -- weeks begin on Monday 5 January 1970
    return now - (now - phase) % rule.period
end

local function fixed_store(key, now, rule, count, start)
    call('SET', key, pack('<ddB', count, start, rule.option) .. (rule.leases or ''), 'PX', expiry(start + rule.period - now))
end

local function fixed_look(key, now, rule)
    local found, raw = fixed_at(key, now, rule)
    local count = found.count
    if rule.charged then
        count = count - rule.cost
        if count < 0 then count = 0 end
    end
    return rule.cost == 0 or rule.forced or count + rule.cost <= rule.limit, found, raw
end

local function fixed_take(key, now, rule, found)
    local start = found.start or fixed_start(found.now, rule)
    fixed_store(key, now, rule, found.count + cost_taken(rule, found.count, held_max), start)
end

local look, take = fixed_look, fixed_take
