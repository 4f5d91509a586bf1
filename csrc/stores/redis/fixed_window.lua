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

look[1] = function(key, now, rule)
    local found, raw = fixed_at(key, now, rule)
    local count = found.count
    if rule.charged then
        count = count - rule.cost
        if count < 0 then count = 0 end
    end
    return rule.cost == 0 or rule.forced or count + rule.cost <= rule.limit, found, raw
end

take[1] = function(key, now, rule, found)
    local start = found.start or fixed_start(found.now, rule)
    fixed_store(key, now, rule, found.count + cost_taken(rule, found.count, held_max), start)
end

knock[1] = function(key, now, rule, found)
    fixed_store(key, now, rule, held_denied(found.count, rule.limit, rule.cost), fixed_start(found.now, rule))
end

give[1] = function(key, now, rule)
    local found = fixed_at(key, now, rule)
    if not found.start or (rule.own and rule.stamp ~= found.start) or found.count == 0 then return end
    local count = found.count - rule.cost
    fixed_store(key, now, rule, count > 0 and count or 0, found.start)
end

stamp[1] = function(rule, found)
    return found.start or fixed_start(found.now, rule)
end

save[1] = function(key, now, rule, found)
    if found.start then fixed_store(key, now, rule, found.count, found.start) end
end

back[1] = function(key, now, rule, found)
    fixed_back(found, rule.cost, rule.stamp, rule.option)
    save[1](key, now, rule, found)
end
