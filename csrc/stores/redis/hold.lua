-- Between judge.lua and hit.lua: a hit that is held by a lease (op 2), or is denied and counts: here, or in another slot of a
-- cluster (op 5), where the groups say so that deny there. That is answered with a 3, and nothing is taken beside.
if op == 2 and allowed == 1 then
    local id, lease = unpack('<c8d', ARGV[1], 10)
    for _, rule in ipairs(rules) do
        if rule.charges and #(rule.leases or '') >= 20480 then return pack('<Bd', 2, now) end
    end
    for _, rule in ipairs(rules) do
        if rule.charges then
            rule.leases = lease_add(rule.leases, id, now + lease, rule.cost, stamp(rule.key, now, rule, rule.found), rule.option)
        end
    end
elseif op == 5 or op == 0 and allowed == 0 then
    -- Groups in which what is denied counts too: those that deny. Such a state is told as it is afterwards.
    local group, denies = {}, {}
    for i, rule in ipairs(rules) do
        local flags = ARGV[i + 1]:byte(3)
        group[i] = floor(flags / 8) % 16
        if not rule.fits or flags >= 128 then denies[group[i]] = true end
    end
    if op == 5 then allowed = 3 end
    for i, rule in ipairs(rules) do
        local holds = rule.algorithm >= 4 and rule.burst or rule.limit
        if group[i] > 0 and denies[group[i]] and rule.charges and rule.cost <= holds then
            local write = rule.fits and take or knock
            write(rule.key, now, rule, rule.found)
            local _, _, raw = look(rule.key, now, rule)
            rule.raw = raw
        end
    end
end
