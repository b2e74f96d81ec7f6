-- Frees the mutex if it is the caller's, leaves the queue, and wakes the next one if nobody has it.
-- ARGV: 1 contender, 2 what the fence says of the caller, 3 holding: - nothing, ? unknown, or a token; 4 place in the
-- queue, 0 for none; 5 1 on a standalone server.
local values = redis.call('MGET', KEYS[1], KEYS[3], KEYS[5])
local owner, fence, turn = values[1], values[2], values[3]
local head = redis.call('ZRANGE', KEYS[2], '0', '0')[1]

-- The usual case, before so much as a function is made: it is the caller's, and nobody waits for it.
if owner == ARGV[1] and fence == ARGV[3] .. ' ' .. ARGV[2] and ARGV[4] == '0' and not head and not turn then
  redis.call('DEL', KEYS[1])
  redis.call('PUBLISH', KEYS[1] .. ':owner', 'released@@' .. owner)
  return 1
end

