-- Renews a hold. It declares only keys that exist while the mutex is held: a node of a cluster refuses a call of which
-- some keys are missing while their slot moves. KEYS: 1 mutex, 2 fence. ARGV as for contend.lua.
-- Returns the token as text, or 0 if the caller does not hold the mutex, or its fence is lost.
local values = redis.call('MGET', KEYS[1], KEYS[2])
local fence = values[2]
if values[1] ~= ARGV[1] or not fence or string.sub(fence, 18) ~= ARGV[2] then return 0 end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[2], FENCE_KEPT)
return string.sub(fence, 1, 16)
