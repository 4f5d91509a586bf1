-- How many keys of ours there are and what memory they take, from a sample: so many pages of SCAN from a cursor on, the
-- memory of every eighth of ours. Reads only.
--
-- ARGV: the cursor, what our keys begin with, pages at most, keys a page. Answers all keys of the database, those that were
-- looked at, ours among them, how many were measured, their bytes, the next cursor, 1 where all were looked at.
local cursor, prefix = ARGV[1], ARGV[2]
local from_beginning = cursor == '0'
local pattern = '^' .. prefix .. '%x%x%x%x%x%x%x%x:{' -- neither the secret nor what is kept for operators
local seen, ours, measured, bytes = 0, 0, 0, 0
for _ = 1, tonumber(ARGV[3]) do
    local page = redis.call('SCAN', cursor, 'COUNT', ARGV[4])
    cursor = page[1]
    for _, name in ipairs(page[2]) do
        seen = seen + 1
        if name:find(pattern) then
            ours = ours + 1
            if ours % 8 == 1 and measured < 32 then
                local size = redis.pcall('MEMORY', 'USAGE', name) -- of a slot that is on its way here it is refused
                if type(size) == 'number' then measured, bytes = measured + 1, bytes + size end
            end
        end
    end
    if cursor == '0' then break end
end
return { redis.call('DBSIZE'), seen, ours, measured, bytes, cursor, from_beginning and cursor == '0' and 1 or 0 }
