-- Which of the commands that the scripts use this user may not call; run once when a store is opened. KEYS[1] is a
-- key of our own that nothing else uses. It is given a text first: list commands then answer WRONGTYPE where they are
-- allowed, and nothing is ever written without an expiry.
local missing = {}
local function denied(reply)
    if type(reply) ~= 'table' or not reply.err then return false end
    local text = reply.err
    return text:find("can't run this command", 1, true) or text:find('NOPERM', 1, true) or
           text:find('no permissions', 1, true) or text:find("can't access", 1, true)
end
local function try(name, ...)
    local reply = redis.pcall(name, ...)
    if denied(reply) then missing[#missing + 1] = '+' .. name:lower() end
    return reply
end
if redis.replicate_commands then redis.replicate_commands() end
local key = KEYS[1]
try('TIME')
try('GET', key)
local set = try('SET', key, 'x', 'PX', 1000)
try('PEXPIRE', key, 1000)
try('LRANGE', key, 0, 0)
try('LLEN', key)
try('LINDEX', key, 0)
if type(set) == 'table' and set.ok then
    try('RPUSH', key, 'x')
    try('LSET', key, 0, 'x')
    try('LTRIM', key, 0, 0)
end
try('DEL', key)
return table.concat(missing, ' ')
