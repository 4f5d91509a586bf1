-- What every script begins with. A script is this file, the algorithms it is asked for, and hit.lua or refund.lua
-- behind them. Must not enter: tostring() on a number (it keeps 14 digits), a key that is not in KEYS, a write
-- without an expiry.
--
-- Numbers are doubles, whole and below 2^53; the product of two of them may not be, see divide().
if redis.replicate_commands then redis.replicate_commands() end
local call, pack, unpack, floor, format = redis.call, struct.pack, struct.unpack, math.floor, string.format

-- An algorithm adds its three functions under its number (tg_algorithm):
--   look[a](key, now, rule) -> fits, found, raw   reads; what the client needs to know is `raw`
--   take[a](key, now, rule, found)                writes; only after every rule of the call has been looked at
--   give[a](key, now, rule)                       a refund
--   knock[a](key, now, rule, found)               a denied hit that counts all the same
--   stamp[a](rule, found)                         what a refund will need to find the hit again
--   back[a](key, now, rule, found)                gives rule.cost of the hit of rule.stamp back, and writes
--   save[a](key, now, rule, found)                writes what is found, for its leases
local stamp, back, save = {}, {}, {}
local look, take, give, knock = {}, {}, {}, {}

-- ARGV[1]: the time in microseconds under a manual clock, else below zero; then the kind of call.
local now, op = unpack('<dB', ARGV[1])
local manual = now >= 0
if not manual then
    local time = call('TIME')
    now = time[1] * 1000000 + time[2]
end

-- How long a key may live, in milliseconds as text: until its state equals an absent one, rounded up. A manual clock
-- and the server's own have nothing to do with each other: there it is a day.
local function expiry(wait)
    if manual then return '86400000' end
    local ms = floor(wait / 1000) + 1
    if ms < 1 then ms = 1 end
    if ms < 1 then ms = 1 end -- all was given back: it equals an absent one already
    if ms > 9007199254740 then ms = 9007199254740 end
    return format('%.0f', ms)
end

-- x * y modulo 2^52, for x and y below 2^52: in two limbs of 26 bits, so that no step reaches 2^53.
local function low(x, y)
    local x0, y0 = x % 67108864, y % 67108864
    local cross = (x - x0) / 67108864 * y0 % 67108864 + x0 * ((y - y0) / 67108864) % 67108864
    return (x0 * y0 + cross % 67108864 * 67108864) % 4503599627370496
end

-- x * y / z as whole quotient and rest, exact, for a quotient below 2^50 and z below 2^50. The quotient in doubles is
-- at most one off; the true rest then lies within two z of zero, and its low 52 bits tell it.
local function divide(x, y, z)
    local product = x * y
    if product < 9007199254740992 then
        local rest = product % z
        return (product - rest) / z, rest
    end
    local quotient = floor(product / z)
    local rest = (low(x, y) - low(quotient, z)) % 4503599627370496
    if rest >= 2251799813685248 then rest = rest - 4503599627370496 end
    if rest < 0 then return quotient - 1, rest + z end
    if rest >= z then return quotient + 1, rest - z end
    return quotient, rest
end

-- ARGV[n + 1] describes the n-th target. One that follows has its key from an earlier target: it is only judged. One that
-- is forced fits whatever stands there. Who waits in line has its patience behind the rest.
local function rule_of(n)
    local text = ARGV[n + 1]
    local a, key, flags, limit, burst, period, cost, option, own, stamp = unpack('<BBBdddddBd', text)
    local charged = flags % 2 == 1
    return { algorithm = a, key = key, charged = charged, follows = flags % 4 >= 2, limit = limit, burst = burst,
             period = period, cost = cost, option = option, own = own == 1, stamp = stamp,
             forced = flags % 8 >= 4 and not charged, group = (flags - flags % 8) / 8,
             patience = #text > 52 and not charged and unpack('<d', text, 53) or 0 }
end

-- What is held when a denied hit counts: no more than the rule holds, and never less than before.
local function held_denied(held, most, cost)
    if held >= most then return held end
    return held + cost < most and held + cost or most
end

-- Leases stand behind the numbers of a value, in a log behind those of its first element: 40 bytes each (id, end, units, stamp,
-- option), the one that ends first in front. Whoever looks at a state first gives back what has ended: `give_back(found, cost,
-- stamp, option)`. The rest is rule.leases, and every write keeps it. Returns whether something has ended.
local clock = now
local function lapse(rule, found, give_back)
    local text, at = rule.leases, 1
    while text and at < #text do
        local _, ends, cost, taken_at, option = unpack('<c8dddd', text, at)
        if ends > clock then break end
        give_back(found, cost, taken_at, option)
        at = at + 40
    end
    if at > 1 then rule.leases = text:sub(at) end
    return at > 1
end

local function lease_find(text, id)
    for at = 1, text and #text or 0, 40 do
        if text:sub(at, at + 7) == id then return at end
    end
end

local function lease_cut(text, at)
    return text:sub(1, at - 1) .. text:sub(at + 40)
end

local function lease_add(text, id, ends, cost, taken_at, option)
    text = text or ''
    local at = #text + 1
    while at > 1 and select(2, unpack('<c8d', text, at - 40)) > ends do at = at - 40 end
    return text:sub(1, at - 1) .. pack('<c8dddd', id, ends, cost, taken_at, option) .. text:sub(at)
end

-- TG_HELD_MAX of algorithms.h, and what a hit takes where `held` units are.
local held_max = 562949953421312
local function cost_taken(rule, held, most)
    if not rule.forced then return rule.cost end
    local room = most - held
    if room < 0 then room = 0 end
    return rule.cost < room and rule.cost or room
end
