-- What every script begins with; script.c tells what follows. Must not enter: tostring() on a number (it keeps 14
-- digits), a key that is not in KEYS, a write without an expiry.
--
-- Numbers are doubles, whole and below 2^53; the product of two of them may not be, see divide().
local call, pack, unpack, floor = redis.call, struct.pack, struct.unpack, math.floor

-- An algorithm is a file with what a hit needs,
--   look(key, now, rule) -> fits, found, raw   reads; what the client needs to know is `raw`
--   take(key, now, rule, found)                writes; only after every rule of the call has been looked at
-- and one (_more) with what refunds, leases and denied hits that count need besides:
--   give(key, now, rule)                       a refund
--   knock(key, now, rule, found)               a denied hit that counts all the same
--   stamp(key, now, rule, found)               what a refund will need to find the hit again
--   give_back(key, now, rule, found)           gives rule.cost of the hit of rule.stamp back, and writes
--   save(key, now, rule, found)                writes what is found, for its leases
-- Each begins with its algorithm's name, and is known by the bare name where a script has one algorithm; mixed.lua
-- chooses where it has several.
--
-- A function that stands in a script is made anew for each call, and so is every table: that, and not what they do, is
-- most of what a script costs the server. So a plain hit has nothing in it that it does not need.

-- ARGV[1]: the time in microseconds under a manual clock, else below zero; then the kind of call.
local now, op = unpack('<dB', ARGV[1])
local manual = now >= 0
if not manual then
    local time = call('TIME')
    now = time[1] * 1000000 + time[2]
end

-- How long a key may live, in milliseconds: until its state equals an absent one, rounded up. A manual clock and the
-- server's own have nothing to do with each other: there it is a day. Redis writes a number as a whole one up to 2^53.
local function expiry(wait)
    if manual then return 86400000 end
    local ms = floor(wait / 1000) + 1
    if ms < 1 then return 1 end -- all was given back: it equals an absent one already
    if ms > 9007199254740 then return 9007199254740 end
    return ms
end

-- x * y / z as whole quotient and rest, exact, for a quotient below 2^50 and z below 2^50. The quotient in doubles is
-- at most one off; the true rest then lies within two z of zero, and its low 52 bits tell it.
local function divide(x, y, z)
    local product = x * y
    if product < 9007199254740992 then
        local rest = product % z
        return (product - rest) / z, rest
    end
    -- x * y modulo 2^52, for x and y below 2^52: in two limbs of 26 bits, so that no step reaches 2^53.
    local function low(x, y)
        local x0, y0 = x % 67108864, y % 67108864
        local cross = (x - x0) / 67108864 * y0 % 67108864 + x0 * ((y - y0) / 67108864) % 67108864
        return (x0 * y0 + cross % 67108864 * 67108864) % 4503599627370496
    end
    local quotient = floor(product / z)
    local rest = (low(x, y) - low(quotient, z)) % 4503599627370496
    if rest >= 2251799813685248 then rest = rest - 4503599627370496 end
    if rest < 0 then return quotient - 1, rest + z end
    if rest >= z then return quotient + 1, rest - z end
    return quotient, rest
end

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
