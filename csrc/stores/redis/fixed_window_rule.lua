-- Fixed window under any rule.
local function fixed_back(found, cost, taken_at, option)
    if found.start ~= taken_at or found.kind ~= option then return end
    found.count = found.count > cost and found.count - cost or 0
end

local function fixed_at(key, now, rule)
    local raw = call('GET', key)
    if not raw then return { now = now, count = 0 }, '' end
    if #raw > 17 then rule.leases, raw = raw:sub(18), raw:sub(1, 17) end
    local count, start, at = fixed_now(raw, now, rule.period, rule.option)
    local found = { now = at, count = count, start = start, kind = raw:byte(17) }
    if lapse(rule, found, fixed_back) and start then raw = pack('<ddB', found.count, start, found.kind) end
    found.raw = raw
    return found, raw
end

local function fixed_write(key, now, rule, count, start)
    fixed_store(key, now, rule.period, rule.option, count, start, rule.leases)
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
    local start = found.start or fixed_start(found.now, rule.period, rule.option)
    fixed_write(key, now, rule, found.count + cost_taken(rule, found.count, held_max), start)
end

local look, take = fixed_look, fixed_take
