if one then
    local raw = call('GET', KEYS[1])
    if not raw or #raw == 24 then
        local index, into, current, previous = counter_now(raw, now, period)
        local fits = cost == 0 or current + counter_weight(previous, into, period) + cost <= limit
        if fits and cost > 0 and op == 0 then
            counter_store(KEYS[1], now, period, index, current + cost, previous)
        end
        return pack('<BdBc0', fits and 1 or 0, now, raw and 24 or 0, raw or '')
    end
end
