-- Fixed window: what a plain hit does not need.
local function fixed_knock(key, now, rule, found)
    fixed_write(key, now, rule, held_denied(found.count, rule.limit, rule.cost), fixed_start(found.now, rule.period, rule.option))
end

local function fixed_give(key, now, rule)
    local found = fixed_at(key, now, rule)
    if not found.start or (rule.own and rule.stamp ~= found.start) or found.count == 0 then return end
    local count = found.count - rule.cost
    fixed_write(key, now, rule, count > 0 and count or 0, found.start)
end

local function fixed_stamp(_, _, rule, found)
    return found.start or fixed_start(found.now, rule.period, rule.option)
end

local function fixed_save(key, now, rule, found)
    if found.start then return fixed_write(key, now, rule, found.count, found.start) end
    call('SET', key, found.raw .. rule.leases, 'PX', expiry(0, rule.leases)) -- its window has ended, and its leases have not
end

local function fixed_give_back(key, now, rule, found)
    fixed_back(found, rule.cost, rule.stamp, rule.option)
    fixed_save(key, now, rule, found)
end
