-- A hit (op 0; held by a lease, op 2) or a look at what a hit would give (op 1). Answers in one string: 1 or 0, the time,
-- and for each target a length and the state as it was. 2: no key has room for another lease, and nothing is written.
local answer = pack('<Bd', allowed, now)
for i = 1, #rules do
    local rule = rules[i]
    if allowed == 1 and rule.charges and op ~= 1 then take(rule.key, now, rule, rule.found) end
    answer = answer .. pack('<Bc0', #rule.raw, rule.raw)
end
return answer
