-- Sliding log: what a plain hit does not need.

-- Appends the hit and drops the oldest entries that the limit no longer needs: only its newest units decide anything.
local function log_knock(key, now, rule, log)
    local but_one = beyond(log.before, log.sum_but_one) > 0 and log.before or log.sum_but_one
    local merges = rule.option > 0 and floor(log.newest / rule.option) == floor(log.now / rule.option)
    local newest = beyond(log.sum, but_one)
    local kept, before, position = log.units, log.before, log.first
    local rows, at = call('LRANGE', key, position, position + 15), 1
    while rows[at] and not (merges and kept <= newest) do
        local _, sum = entry(rows[at])
        local cost = beyond(sum, before)
        if kept - cost + rule.cost < rule.limit then break end
        if cost > 0 then before = sum end
        kept, position, at = kept - cost, position + 1, at + 1
        if at > 16 then rows, at = call('LRANGE', key, position, position + 15), 1 end
    end
    local sum = log.units > 0 and log.sum or log.before
    if merges then
        sum = (sum + held_denied(newest, rule.limit, rule.cost) - newest) % 1099511627776
        call('LSET', key, -1, entry_text(log.now, sum))
    else
        call('RPUSH', key, entry_text(log.now, (sum + rule.cost) % 1099511627776))
    end
    if position > 1 then call('LTRIM', key, position - 1, -1) end
    call('LSET', key, 0, entry_text(0, before) .. (rule.leases or ''))
    call('PEXPIRE', key, expiry(log.now + rule.period - now, rule.leases))
end

-- Oldest first: counting begins `given` further on, and what lies before weighs nothing any more. Entries that have
-- left keep their units for a clock that goes back, and so are moved along; when that were long work they are
-- forgotten.
local function give_oldest(key, log, given)
    local mark, gone = (log.before + given) % 1099511627776, log.first - 1
    if gone > 0 and gone <= 64 then
        local rows = call('LRANGE', key, 0, log.first + 64)
        local emptied = log.first -- position behind the last entry that is given back whole
        while emptied < #rows do
            local _, sum = entry(rows[emptied + 1])
            if beyond(sum, mark) > 0 then break end
            emptied = emptied + 1
        end
        if emptied <= log.first + 64 then
            for i = 0, emptied - 1 do
                local at, sum = entry(rows[i + 1])
                if i >= log.first then
                    sum = mark
                elseif beyond(log.mark, sum) > 0 then
                    sum = log.mark + given
                else
                    sum = sum + given
                end
                call('LSET', key, i, entry_text(at, sum % 1099511627776))
            end
            return
        end
    end
    if gone > 0 then call('LTRIM', key, gone, -1) end
    call('LSET', key, 0, entry_text(0, mark))
end

local function log_give(key, now, rule)
    local log = log_now(key, now, rule)
    if log.units == 0 then return end
    if rule.own then return give_own(key, rule, log) end
    local given = rule.cost < log.units and rule.cost or log.units
    give_oldest(key, log, given)
    if rule.leases then hold(key, rule.leases) end
end

local function log_stamp(_, _, _, log) return log.now end

local function log_save(key, now, rule, log)
    hold(key, rule.leases)
    call('PEXPIRE', key, expiry(log.newest + rule.period - now, rule.leases))
end

local function log_give_back(key, now, rule, log)
    local newest = log_at(key, 0, rule)
    if newest.units > 0 then give_own(key, rule, newest) end
    log_save(key, now, rule, log)
end
