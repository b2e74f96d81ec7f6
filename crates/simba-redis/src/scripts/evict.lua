-- Frees the mutex of a holder that meets the condition, and wakes the next waiter.
-- ARGV: 1 what the condition is about: * nothing, o the owner, t the token; 2 what it must be; 3 1 on a standalone
-- server. Returns {0} if nobody has it, {1, ms left, owner} if it was freed, {2, owner} if it was left alone.
local owner = redis.call('GET', KEYS[1])
if not owner then return {0} end
local fence = redis.call('MGET', KEYS[3])[1]
local token, _, holder = read_fence(fence)
local is = ARGV[1] == 'o' and owner or ARGV[1] == 't' and owner == holder and token
if ARGV[1] ~= '*' and is ~= ARGV[2] then return {2, owner} end
local left = redis.call('PTTL', KEYS[1])
redis.call('DEL', KEYS[1])
-- A JVM owner is still in the queue, and must not be the one that is woken.
redis.call('ZREM', KEYS[2], owner)
redis.call('ZREM', KEYS[4], owner)
redis.call('PUBLISH', KEYS[1] .. ':owner', 'released@@' .. owner)
local now_ms = math.floor(microseconds() / 1000)
wake_next(read_promise(fence, now_ms), first(), owner, nil, now_ms, ARGV[3] == '1')
return {1, left, owner}
