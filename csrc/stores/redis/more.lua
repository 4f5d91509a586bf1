-- What refunds, leases and denied hits that count need besides common.lua.
-- What is held when a denied hit counts: no more than the rule holds, and never less than before.
local function held_denied(held, most, cost)
    if held >= most then return held end
    return held + cost < most and held + cost or most
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

-- What a refund knows besides: whether it is of the caller's own hit, and that hit's stamp.
local function refund_of(n)
    local rule = rule_of(n)
    local own, stamp = unpack('<Bd', ARGV[n + 1], 44)
    rule.own, rule.stamp = own == 1, stamp
    return rule
end
