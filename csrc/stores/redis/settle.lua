-- Ends a lease (op 3: what was taken becomes `value`) or moves its end (op 4: to `value` from now). ARGV[1] goes on with the id,
-- the end as known, and that value; each target is what was taken under one rule. Answers 1 if the lease was there under any of
-- them, and the time: it ends under all at once, and where it is missing before that its state was reset, which owes nothing.
local id, ends, value = unpack('<c8dd', ARGV[1], 10)
local there = 0
for i = 1, #ARGV - 1 do
    local rule = refund_of(i)
    local key = rule.key
    local _, found = look(key, now, rule)
    local at = lease_find(rule.leases, id)
    if at then
        there = 1
        rule.leases = lease_cut(rule.leases, at)
    end
    if op == 4 then
        if at then
            rule.leases = lease_add(rule.leases, id, now + value, rule.cost, rule.stamp, rule.option)
            save(key, now, rule, found)
        end
    else
        local already = (at or now < ends) and rule.cost or 0
        if at and value < rule.cost then
            rule.cost = rule.cost - value
            give_back(key, now, rule, found)
        elseif value > already then
            rule.cost, rule.forced = value - already, true
            take(key, now, rule, found)
        elseif at then
            save(key, now, rule, found)
        end
    end
end
return pack('<Bd', there, now)
