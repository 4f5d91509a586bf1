-- The same for what a plain hit does not need.
local knock = by_algorithm(fixed_knock, log_knock, counter_knock, bucket_knock, bucket_knock)
local give = by_algorithm(fixed_give, log_give, counter_give, bucket_give, bucket_give)
local stamp = by_algorithm(fixed_stamp, log_stamp, counter_stamp, bucket_stamp, bucket_stamp)
local save = by_algorithm(fixed_save, log_save, counter_save, bucket_save, bucket_save)
local give_back = by_algorithm(fixed_give_back, log_give_back, counter_give_back, bucket_give_back, bucket_give_back)
