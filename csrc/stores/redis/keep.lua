-- What operators see and set, for all machines: counts of decisions (KEYS[1]) and overrides (KEYS[2]), both as lines of text.
-- Value and expiry in one write, as everywhere.
--
-- ARGV: the time under a manual clock, else -1; how long counts are kept without a process that counts, in ms; lines to be
-- added to the counts ("name n n n"); 1 where all counts are wanted. Then, to set an override: what it takes the place of
-- ("kind namespace policy identity"), for how long in us (0: not at all), what it says ("rules shown"), how many may stand.
-- Answers the time, the overrides that stand, the counts or '', and why counts were not taken or ''.
if redis.replicate_commands then redis.replicate_commands() end
local call, format = redis.call, string.format
local now = tonumber(ARGV[1])
local manual = now >= 0
if not manual then
    local time = call('TIME')
    now = time[1] * 1000000 + time[2]
end

local NAMES_MAX = 512
local function add(more)
    local names, counts = {}, {}
    local function read(text)
        for name, numbers in text:gmatch('([^ \n]+) ([^\n]*)\n') do
            local own = counts[name]
            if not own and #names >= NAMES_MAX then
                name = '=default:=%28others%29'
                own = counts[name]
            end
            if not own then
                own = {}
                counts[name], names[#names + 1] = own, name
            end
            local i = 0
            for number in numbers:gmatch('%d+') do
                i = i + 1
                own[i] = (own[i] or 0) + tonumber(number)
            end
        end
    end
    read(call('GET', KEYS[1]) or '')
    read(more)
    for i, name in ipairs(names) do
        local own = counts[name]
        for k = 1, #own do own[k] = format('%.0f', own[k]) end
        names[i] = name .. ' ' .. table.concat(own, ' ') .. '\n'
    end
    return redis.pcall('SET', KEYS[1], table.concat(names), 'PX', ARGV[2])
end

local refused = ''
if ARGV[3] ~= '' then
    local done = add(ARGV[3])
    if done.err then refused = done.err end
end

local overrides = call('GET', KEYS[2]) or ''
if ARGV[5] then
    local kept, last = {}, 0
    for line in overrides:gmatch('[^\n]+') do
        local till, rest = line:match('^(%d+) (.*)$')
        if till and tonumber(till) > now and rest:sub(1, #ARGV[5] + 1) ~= ARGV[5] .. ' ' then
            kept[#kept + 1] = line .. '\n'
            last = math.max(last, tonumber(till))
        end
    end
    local lasts = tonumber(ARGV[6])
    if lasts > 0 then
        if #kept >= tonumber(ARGV[8]) then return { format('%.0f', now), overrides, '', 'FULL' } end
        kept[#kept + 1] = format('%.0f', now + lasts) .. ' ' .. ARGV[5] .. ' ' .. ARGV[7] .. '\n'
        last = math.max(last, now + lasts)
    end
    overrides = table.concat(kept)
    if #kept == 0 then
        call('DEL', KEYS[2])
    else
        local ms = manual and 86400000 or math.floor((last - now) / 1000) + 1
        call('SET', KEYS[2], overrides, 'PX', format('%.0f', ms))
    end
end
return { format('%.0f', now), overrides, ARGV[4] == '1' and call('GET', KEYS[1]) or '', refused }
