-- Frees the mutex if it is the caller's, leaves the queue, and wakes the next one if nobody has it.
-- ARGV: 1 contender, 2 what the fence says of the caller, 3 holding: - nothing, ? unknown, or a token; 4 place in the
-- queue, 0 for none; 5 1 on a standalone server.
local id, holding = ARGV[1], ARGV[3]
local values = redis.call('MGET', KEYS[1], KEYS[3], KEYS[5])
local owner, fence, turn = values[1], values[2], values[3]
-- Another session under the same id is a stranger; without a fence only the caller can tell.
local ours = owner == id and (fence and string.sub(fence, 18) == ARGV[2] or not read_fence(fence))
local freed = ours and (holding == '?' or fence and holding == string.sub(fence, 1, 16))
local head = redis.call('ZRANGE', KEYS[2], '0', '0')[1]
if head or ARGV[4] ~= '0' then
  redis.call('ZREM', KEYS[2], id)
  redis.call('ZREM', KEYS[4], id)
end
if freed then
  redis.call('DEL', KEYS[1])
  redis.call('PUBLISH', KEYS[1] .. ':owner', 'released@@' .. id)
end
if turn and (freed or turn == id) then
  redis.call('DEL', KEYS[5])
  turn = false
end
-- A wake-up that the caller does not want any more goes to the next.
if head and not turn and (freed or not owner) then
  wake_next(id, nil, math.floor(microseconds() / 1000), ARGV[5] == '1')
end
return freed and 1 or 0
