-- Renews a hold, in a cluster. Declares only keys that exist while the mutex is held: while a slot moves, a node refuses
-- calls with missing keys.
--
-- KEYS: 1 mutex, 2 fence.
-- ARGV: 1 contender id; 2 caller; 3 lease in ms; more are ignored.
-- Reply: the token as text, or 0 if the caller does not hold the mutex or the fence is lost.
local values = redis.call('MGET', KEYS[1], KEYS[2])
local owner, fence = values[1], values[2]
if owner ~= ARGV[1] or not fence or string.sub(fence, CALLER_AT) ~= ARGV[2] then return 0 end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[2], FENCE_KEPT)
return string.sub(fence, 1, TOKEN_LENGTH)
