-- Gives units back. A key that is not there stays so.
for i = 1, #ARGV - 1 do
    local rule = refund_of(i)
    give(rule.key, now, rule)
end
return 'OK'
