-- Releases the mutex of a holder that meets the condition, and wakes the next waiter.
--
-- KEYS: 1 mutex, 2 queue, 3 fence, 4 alive.
-- ARGV: 1 condition: `any`, `owner` or `token`; 2 required owner or token; 3 1 on a standalone server.
-- Reply: {0} if the mutex is free, {1, ms left, owner} if it was released, {2, owner} if the condition is not met.
-- include shared.lua
local owner, fence = redis.call('GET', KEYS[1]), redis.call('MGET', KEYS[3])[1]
if not owner then return {0} end
local token, _, holder = parse_hold(fence)
local found = ARGV[1] == 'owner' and owner or ARGV[1] == 'token' and owner == holder and token
if ARGV[1] ~= 'any' and found ~= ARGV[2] then return {2, owner} end
local left = redis.call('PTTL', KEYS[1])
redis.call('DEL', KEYS[1])
-- A JVM owner keeps its queue entry, and must not be woken as the next waiter.
remove_waiter(owner)
redis.call('PUBLISH', KEYS[1] .. ':owner', 'released@@' .. owner)
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local last = parse_reservation(fence, now_ms)
wake_next(last, first_waiter(), owner, nil, now_ms, ARGV[3] == '1')
return {1, left, owner}
