-- Sliding counter: what a plain hit does not need.
local function counter_knock(key, now, rule, found)
    counter_write(key, now, rule, found.index, held_denied(found.current, rule.limit, rule.cost), found.previous)
end

local function counter_give(key, now, rule)
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
    counter_write(key, now, rule, found.index, current, previous)
end

local function counter_stamp(_, _, _, found) return found.index end

local function counter_save(key, now, rule, found)
    counter_write(key, now, rule, found.index, found.current, found.previous)
end

local function counter_give_back(key, now, rule, found)
    counter_back(found, rule.cost, rule.stamp)
    counter_save(key, now, rule, found)
end
