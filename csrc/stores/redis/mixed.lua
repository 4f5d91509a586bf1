-- Where a script has several algorithms: each function by the rule's, in the order of tg_algorithm.
local function by_algorithm(...)
    local functions = { ... }
    return function(key, now, rule, found) return functions[rule.algorithm](key, now, rule, found) end
end

local look = by_algorithm(fixed_look, log_look, counter_look, bucket_look, bucket_look)
local take = by_algorithm(fixed_take, log_take, counter_take, bucket_take, bucket_take)
