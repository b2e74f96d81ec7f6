-- The usual cases, before all else, so that not even a function is made for them, and in as few calls as it can be:
-- each costs the server as much as a command. They return the token as text; the rest of the script tells what the
-- arguments are.

-- A renewal: it is ours.
if ARGV[4] == '+' then
  local values = redis.call('MGET', KEYS[1], KEYS[3])
  if values[1] == ARGV[1] and values[2] and string.sub(values[2], 18) == ARGV[2] then
    redis.call('PEXPIRE', KEYS[1], ARGV[3])
    redis.call('PEXPIRE', KEYS[3], FENCE_KEPT)
    return string.sub(values[2], 1, 16)
  end
end

-- A first look: nobody has it, nobody waits for it, and it is promised to nobody.
local behind
if ARGV[4] == '-' and redis.call('EXISTS', KEYS[2], KEYS[5]) == 0
  and redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[3]) then
  local now = redis.call('TIME')
  local token = now[1] .. (#now[2] == 6 and now[2] or string.sub('00000' .. now[2], -6))
  local last = redis.pcall('SET', KEYS[3], token .. ' ' .. ARGV[2], 'PX', FENCE_KEPT, 'GET')
  if not last or type(last) == 'string' and last < token then
    redis.call('PUBLISH', KEYS[1], 'acquired@@' .. ARGV[1])
    return token
  end
  behind = last
end

