-- Sliding log (2). A list of 12-byte entries, oldest first: when (7 bytes) and the sum of all costs up to and with
-- this entry (5 bytes, modulo 2^40). The cost of an entry is the distance of two sums, so that the units in any
-- stretch of the log, and the entry with which a number of units is reached, are found without reading what lies
-- between.
--
-- The first element is no entry: its sum is where counting begins. It is what remains of the last entry that left, or
-- has been moved forward by a refund: entries whose sum it has passed weigh nothing. A list rather than a string:
-- nodes of 8 KiB fill up, while a string that grows is given twice its size.
--
-- `option` is the resolution: entries within one multiple of it are one.
local function entry(text)
    local at, at_high, sum, sum_high = unpack('<I4I3I4I1', text)
    return at_high * 4294967296 + at, sum_high * 4294967296 + sum
end

local function entry_text(at, sum)
    local at_low, sum_low = at % 4294967296, sum % 4294967296
    return pack('<I4I3I4I1', at_low, (at - at_low) / 4294967296, sum_low, (sum - sum_low) / 4294967296)
end

-- How far sum `a` lies beyond `b`; 0 when it does not. All sums of one log lie within 2^39 of each other.
local function beyond(a, b)
    local distance = (a - b) % 1099511627776
    return distance < 549755813888 and distance or 0
end

-- Positions count from 0 as in LINDEX. `first` is that of the oldest entry within the period, nil when there is none;
-- `before` the sum in front of it.
local function log_at(key, now, rule)
    local head = call('LRANGE', key, 0, 15)
    local read = #head
    if read == 0 then return { key = key, now = now, units = 0, empty = true } end
    local tail = head
    if read == 16 then tail = call('LRANGE', key, -2, -1) end
    local newest, sum = entry(tail[#tail])
    local _, mark = entry(head[1])
    if now < newest then now = newest end -- a clock that goes back counts as the newest entry
    local log = { key = key, now = now, units = 0, newest = newest, head = head, read = read, sum = sum, mark = mark }
    _, log.sum_but_one = entry(tail[#tail - 1])
    local left = now - rule.period -- what happened then or earlier has left
    if newest <= left then
        log.before = beyond(mark, sum) > 0 and mark or sum
        return log
    end
    local before = mark
    for i = 2, read do
        local at, upto = entry(head[i])
        if at > left then log.first, log.oldest = i - 1, at; break end
        before = upto
    end
    if not log.first then
        log.length = call('LLEN', key)
        local from, to = read, log.length - 1
        while from < to do
            local middle = floor((from + to) / 2)
            if entry(call('LINDEX', key, middle)) > left then to = middle else from = middle + 1 end
        end
        log.first = from
        _, before = entry(call('LINDEX', key, from - 1))
    end
    log.marked = beyond(mark, before) > 0
    log.before = log.marked and mark or before
    log.units = beyond(sum, log.before)
    return log
end

-- Of the first element, what stands behind its numbers.
local function hold(key, leases)
    local head = call('LINDEX', key, 0)
    if head then call('LSET', key, 0, head:sub(1, 12) .. leases) end
end

-- Takes units out of the entries of one time, newest first, and moves the sums behind them. Right after the hit there
-- is next to nothing behind it.
local function give_own(key, rule, log)
    local step = rule.option > 0 and rule.option or 1
    local wanted = floor(rule.stamp / step)
    local from, to = log.first, call('LLEN', key) - 1
    local last = to
    while from < to do
        local middle = floor((from + to) / 2)
        if floor(entry(call('LINDEX', key, middle)) / step) >= wanted then to = middle else from = middle + 1 end
    end
    local rows = call('LRANGE', key, from - 1, last)
    local _, base = entry(rows[1])
    if beyond(log.before, base) > 0 then base = log.before end
    local at, cost, previous = {}, {}, base
    for i = 2, #rows do
        local sum
        at[i], sum = entry(rows[i])
        cost[i] = beyond(sum, previous)
        if cost[i] > 0 then previous = sum end
    end
    local rest = rule.cost
    for i = #rows, 2, -1 do
        if floor(at[i] / step) == wanted then
            local given = rest < cost[i] and rest or cost[i]
            cost[i], rest = cost[i] - given, rest - given
        end
    end
    if rest == rule.cost then return end
    local batch, sum = {}, base
    if #rows > 64 then call('LTRIM', key, 0, from - 1) end
    for i = 2, #rows do
        sum = (sum + cost[i]) % 1099511627776
        local text = entry_text(at[i], sum)
        if #rows > 64 then
            batch[#batch + 1] = text
            if #batch == 512 or i == #rows then
                call('RPUSH', key, _G.unpack(batch))
                batch = {}
            end
        elseif text ~= rows[i] then
            call('LSET', key, from - 2 + i, text)
        end
    end
end

-- What has ended is given back at once: units in a log are not given back in passing.
local function log_now(key, now, rule)
    local log = log_at(key, now, rule)
    if log.empty or #log.head[1] == 12 then return log end
    rule.leases = log.head[1]:sub(13)
    local ended = lapse(rule, log, function(_, cost, taken_at, option)
        local newest = log_at(key, 0, rule)
        if newest.units > 0 then give_own(key, { cost = cost, stamp = taken_at, option = option }, newest) end
    end)
    if not ended then return log end
    hold(key, rule.leases)
    return log_at(key, now, rule)
end

-- When the `wanted`-th unit within the period was taken.
local function time_of_unit(log, wanted)
    local at, sum
    for i = log.first + 1, log.read do
        at, sum = entry(log.head[i])
        if beyond(sum, log.before) >= wanted then return at end
    end
    log.length = log.length or call('LLEN', log.key)
    local from, to = log.read > log.first and log.read or log.first, log.length - 1
    local guess = log.first + wanted - 1 -- where it lies if every hit costs 1
    if guess >= from and guess < to then
        local two = call('LRANGE', log.key, guess - 1, guess)
        at, sum = entry(two[2])
        local _, sum_before = entry(two[1])
        if beyond(sum_before, log.before) >= wanted then
            to = guess - 1
        elseif beyond(sum, log.before) >= wanted then
            return at
        else
            from = guess + 1
        end
    end
    while from < to do
        local middle = floor((from + to) / 2)
        local _, middle_sum = entry(call('LINDEX', log.key, middle))
        if beyond(middle_sum, log.before) >= wanted then to = middle else from = middle + 1 end
    end
    return (entry(call('LINDEX', log.key, from)))
end

-- For the client: units within the period, the newest entry, with whose departure this cost fits, with whose the log is
-- fresh, which leaves next; -1 where there is none.
local function log_look(key, now, rule)
    local log = log_now(key, now, rule)
    local own = 0
    if rule.charged then own = rule.cost < log.units and rule.cost or log.units end
    local used = log.units - own
    local fits = rule.cost == 0 or rule.forced or used + rule.cost <= rule.limit
    local makes_room, last, leaves = -1, -1, -1
    if not fits and rule.cost <= rule.limit then makes_room = time_of_unit(log, used + rule.cost - rule.limit) end
    local told = (fits or rule.follows) and log.units or used
    if told > 0 then
        local but_one = beyond(log.before, log.sum_but_one) > 0 and log.before or log.sum_but_one
        last = told == log.units and beyond(log.sum, but_one) > 0 and log.newest or time_of_unit(log, told)
    end
    if log.units > 0 then leaves = not log.marked and log.oldest or time_of_unit(log, 1) end
    return fits, log, pack('<ddddd', log.units, log.newest or -1, makes_room, last, leaves)
end

local function log_append(key, now, rule, log)
    local cost = cost_taken(rule, log.units, 34359738368) -- TG_LOG_HELD_MAX: sums stay within 2^39 of each other
    local lasts = expiry(log.now + rule.period - now, rule.leases)
    if log.empty then
        call('RPUSH', key, entry_text(0, 0), entry_text(log.now, cost))
        -- Both or none also where PEXPIRE has been forbidden since this store was opened.
        local done = redis.pcall('PEXPIRE', key, lasts)
        if type(done) == 'table' and done.err then
            call('DEL', key)
            call('PEXPIRE', key, lasts)
        end
        return
    end
    if not log.first then
        call('LTRIM', key, -1, -1)
        if log.before ~= log.sum then call('LSET', key, 0, entry_text(0, log.before)) end
    elseif log.first > 8 then -- now and then, not a call for every entry that leaves
        call('LTRIM', key, log.first - 1, -1)
        if log.marked then call('LSET', key, 0, entry_text(0, log.before)) end
    end
    local sum = log.units > 0 and log.sum or log.before -- all given back: the mark lies beyond the newest
    local text = entry_text(log.now, (sum + cost) % 1099511627776)
    if rule.option > 0 and log.first and floor(log.newest / rule.option) == floor(log.now / rule.option) then
        call('LSET', key, -1, text)
    else
        call('RPUSH', key, text)
    end
    call('PEXPIRE', key, lasts)
end

local function log_take(key, now, rule, log)
    log_append(key, now, rule, log)
    if rule.leases then hold(key, rule.leases) end
end

local look, take = log_look, log_take
