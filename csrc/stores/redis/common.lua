-- What every script begins with; script.c tells what follows. Must not enter: tostring() on a number (it keeps 14
-- digits), a key that is not in KEYS, a write without an expiry.
--
-- Numbers are doubles, whole and below 2^53; the product of two of them may not be, see divide().
local call, pack, unpack, floor = redis.call, struct.pack, struct.unpack, math.floor

-- A function that stands in a script is made anew for each call, and so is every table: that, and not what they do, is
-- most of what a script costs the server. So scripts hold what their kind of call needs, and the commonest kind ends before
-- the functions of the others are made. Of an algorithm there are
--
--   x.lua         a state as numbers: what it is now, and writing it
--   x_one.lua     the whole of a hit under one rule, with nothing special about it; between one.lua and rules.lua
--   x_rule.lua    x_look(key, now, rule) -> fits, found, raw   reads; what the client needs to know is `raw`
--                 x_take(key, now, rule, found)                writes; only after every rule of the call has been looked at
--   x_more.lua    x_give(key, now, rule)                       a refund
--                 x_knock(key, now, rule, found)               a denied hit that counts all the same
--                 x_stamp(key, now, rule, found)               what a refund will need to find the hit again
--                 x_give_back(key, now, rule, found)           gives rule.cost of the hit of rule.stamp back, and writes
--                 x_save(key, now, rule, found)                writes what is found, for its leases
--
-- They are known as look, take and so on where a script has one algorithm; mixed.lua chooses where it has several.

-- ARGV[1]: the time in microseconds under a manual clock, else below zero; then the kind of call.
local now, op = unpack('<dB', ARGV[1])
local manual = now >= 0
if not manual then
    local time = call('TIME')
    now = time[1] * 1000000 + time[2]
end

-- How long a key may live, in milliseconds: until its state equals an absent one and no lease stands in it, rounded up. A
-- manual clock and the server's own have nothing to do with each other: there it is a day. Redis writes a number as a whole
-- one up to 2^53.
local function expiry(wait, leases)
    if manual then return 86400000 end
    if leases and #leases > 0 then
        local ends = unpack('<d', leases, #leases - 31) -- of the last one
        if ends - now > wait then wait = ends - now end
    end
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
