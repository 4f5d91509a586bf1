-- Judges every rule. What follows writes every key, or none.
local rules, allowed = {}, 1
for i = 1, #ARGV - 1 do
    local rule = rule_of(i)
    rule.fits, rule.found, rule.raw = look(rule.key, now, rule)
    if not rule.fits then allowed = 0 end
    rules[i] = rule
end
