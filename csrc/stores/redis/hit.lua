-- A hit (op 0) or a look at what a hit would give (op 1): every rule is judged, then every key is written or none.
-- Answers in one string: 1 or 0, the time, and for each target a length and the state as it was.
local count = #ARGV - 1
local rules, found, pieces, allowed = {}, {}, {}, 1
for i = 1, count do
    local rule = rule_of(i)
    local fits, state, raw = look[rule.algorithm](KEYS[rule.key], now, rule)
    if not fits then allowed = 0 end
    rules[i], found[i], pieces[i] = rule, state, pack('<Bc0', #raw, raw)
end
if allowed == 1 and op == 0 then
    for i = 1, count do
        local rule = rules[i]
        if rule.cost > 0 and not rule.charged and not rule.follows then -- several rules on one key: it is charged once
            take[rule.algorithm](KEYS[rule.key], now, rule, found[i])
        end
    end
end
return pack('<Bd', allowed, now) .. table.concat(pieces)
