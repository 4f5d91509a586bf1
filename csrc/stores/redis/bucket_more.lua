-- Token bucket and leaky bucket: what a plain hit does not need.
local function bucket_knock(key, now, rule, found)
    local units, rest = found.units, found.rest
    if units < rule.burst then
        units = units + rule.cost
        if units >= rule.burst then units, rest = rule.burst, 0 end
    end
    bucket_write(key, now, rule, units, rest, found.now)
end

local function bucket_give(key, now, rule)
    local found = bucket_at(key, now, rule)
    if found.units == 0 and found.rest == 0 then return end -- fresh: a state that may as well be gone learns no time
    local units, rest = found.units - rule.cost, found.rest
    if units < 0 then units, rest = 0, 0 end
    bucket_write(key, now, rule, units, rest, found.now)
end

local function bucket_save(key, now, rule, found)
    bucket_write(key, now, rule, found.left, found.left_rest, found.left_at)
end

local function bucket_give_back(key, now, rule, found)
    bucket_back(found, rule.cost)
    bucket_save(key, now, rule, found)
end

local function bucket_stamp(_, _, _, found) return found.now end
