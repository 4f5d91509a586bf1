if one then
    local raw = call('GET', KEYS[1])
    if not raw or #raw == 17 then
        local count, start, at = 0, nil, now
        if raw then count, start, at = fixed_now(raw, now, period, option) end
        local fits = cost == 0 or count + cost <= limit
        if fits and cost > 0 and op == 0 then
            fixed_store(KEYS[1], now, period, option, count + cost, start or fixed_start(at, period, option))
        end
        return pack('<BdBc0', fits and 1 or 0, now, raw and 17 or 0, raw or '')
    end
end
