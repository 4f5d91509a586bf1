-- Any number of rules of any kind.
-- ARGV[n + 1] describes the n-th target. One that follows has its key from an earlier target: it is only judged, since a
-- key under several rules is charged once. One that is forced fits whatever stands there. Who waits in line has its
-- patience behind the rest. The last four are what judge.lua finds; Lua makes room for them at once.
local function rule_of(n)
    local text = ARGV[n + 1]
    local a, key, flags, limit, burst, period, cost, option = unpack('<BBBddddd', text)
    local charged, follows = flags % 2 == 1, flags % 4 >= 2
    return { algorithm = a, key = KEYS[key], charged = charged, follows = follows, limit = limit, burst = burst,
             period = period, cost = cost, option = option, forced = flags % 8 >= 4 and not charged,
             patience = #text > 52 and not charged and unpack('<d', text, 53) or 0,
             charges = cost > 0 and not charged and not follows,
             leases = false, fits = false, found = false, raw = false }
end

-- Leases stand behind the numbers of a value, in a log behind those of its first element: 40 bytes each (id, end, units, stamp,
-- option), the one that ends first in front. Whoever looks at a state first gives back what has ended: `give_back(found, cost,
-- stamp, option)`. The rest is rule.leases, and every write keeps it. Returns whether something has ended.
local function lapse(rule, found, give_back)
    local text, at = rule.leases, 1
    while text and at < #text do
        local _, ends, cost, taken_at, option = unpack('<c8dddd', text, at)
        if ends > now then break end
        give_back(found, cost, taken_at, option)
        at = at + 40
    end
    if at > 1 then rule.leases = text:sub(at) end
    return at > 1
end

-- TG_HELD_MAX of algorithms.h, and what a hit takes where `held` units are.
local held_max = 562949953421312
local function cost_taken(rule, held, most)
    if not rule.forced then return rule.cost end
    local room = most - held
    if room < 0 then room = 0 end
    return rule.cost < room and rule.cost or room
end
