-- A hit (op 0), one that is held by a lease (op 2), or a look at what a hit would give (op 1): every rule is judged, then every
-- key is written or none. Answers in one string: 1 or 0, the time, and for each target a length and the state as it was. 2: no
-- key has room for another lease, and nothing is written.
local count = #ARGV - 1
local rules, found, pieces, fitting, allowed = {}, {}, {}, {}, 1
for i = 1, count do
    local rule = rule_of(i)
    local fits, state, raw = look[rule.algorithm](KEYS[rule.key], now, rule)
    if not fits then allowed = 0 end
    rules[i], found[i], fitting[i], pieces[i] = rule, state, fits, pack('<Bc0', #raw, raw)
end
local function charges(rule)
    return rule.cost > 0 and not rule.charged and not rule.follows -- several rules on one key: it is charged once
end
if allowed == 1 and op == 2 then
    local id, lease = unpack('<c8d', ARGV[1], 10)
    for i = 1, count do
        local rule = rules[i]
        if charges(rule) and #(rule.leases or '') >= 20480 then return pack('<Bd', 2, now) end
    end
    for i = 1, count do
        local rule = rules[i]
        if charges(rule) then
            local taken_at = stamp[rule.algorithm](rule, found[i])
            rule.leases = lease_add(rule.leases, id, now + lease, rule.cost, taken_at, rule.option)
        end
    end
end
if allowed == 1 and op ~= 1 then
    for i = 1, count do
        local rule = rules[i]
        if charges(rule) then
            take[rule.algorithm](KEYS[rule.key], now, rule, found[i])
        end
    end
elseif op == 0 then
    -- Groups in which what is denied counts too: those that deny. Such a state is told as it is afterwards.
    local denies = {}
    for i = 1, count do
        if not fitting[i] then denies[rules[i].group] = true end
    end
    for i = 1, count do
        local rule = rules[i]
        local holds = rule.algorithm >= 4 and rule.burst or rule.limit
        if rule.group > 0 and denies[rule.group] and rule.cost > 0 and rule.cost <= holds and not rule.charged and
            not rule.follows then
            local write = fitting[i] and take or knock
            write[rule.algorithm](KEYS[rule.key], now, rule, found[i])
            local _, _, raw = look[rule.algorithm](KEYS[rule.key], now, rule)
            pieces[i] = pack('<Bc0', #raw, raw)
        end
    end
end
return pack('<Bd', allowed, now) .. table.concat(pieces)
