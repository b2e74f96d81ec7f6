-- The usual cases, before so much as a function is made, and in as few calls as it can be: each costs the server as
-- much as a command. They return the token as text; the rest of the script tells what the arguments are.
local values = redis.call('MGET', KEYS[1], KEYS[3])
local owner, fence = values[1], values[2]

-- A renewal: it is ours.
if ARGV[4] == '+' and owner == ARGV[1] and fence and string.sub(fence, 18) == ARGV[2] then
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
  redis.call('PEXPIRE', KEYS[3], FENCE_KEPT)
  return string.sub(fence, 1, 16)
end

local now = redis.call('TIME')
local stamp = now[1] .. (#now[2] == 6 and now[2] or string.sub('00000' .. now[2], -6))

-- A first look: nobody has it, nobody waits for it, and it is promised to nobody.
local promised = fence and string.sub(fence, 1, 1) == '!'
local free = ARGV[4] == '-' and not owner and not promised and (not fence or fence < stamp)
  and redis.call('EXISTS', KEYS[2]) == 0
-- A waiter that was woken: nobody has it, and it is promised to the caller: "!<end in ms> <last token> <waiter>".
local woken = ARGV[4] == '~' and not owner and promised and string.sub(fence, 33) == ARGV[1]
  and string.sub(fence, 16, 31) < stamp
  and string.sub(fence, 2, 14) > string.sub(stamp, 1, 13)
if (free or woken) and redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[3]) then
  redis.call('SET', KEYS[3], stamp .. ' ' .. ARGV[2], 'PX', FENCE_KEPT)
  if woken then
    redis.call('ZREM', KEYS[2], ARGV[1])
    redis.call('ZREM', KEYS[4], ARGV[1])
  end
  redis.call('PUBLISH', KEYS[1], 'acquired@@' .. ARGV[1])
  return stamp
end

