if one then
    local raw = call('GET', KEYS[1])
    if not raw or #raw == 24 then
        local units, rest, at = 0, 0, now
        if raw then units, rest, at = bucket_now(raw, now, limit, period) end
        local fits = cost == 0 or bucket_holds(burst, units + cost, rest)
        if fits and cost > 0 and op == 0 then
            bucket_store(KEYS[1], now, limit, period, units + cost, rest, at)
        end
        return pack('<BdBc0', fits and 1 or 0, now, raw and 24 or 0, raw or '')
    end
end
