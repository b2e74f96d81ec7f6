-- Frees the mutex if it is the caller's, leaves the queue, and wakes the next one if nobody has it.
-- ARGV: 1 contender, 2 what the fence says of the caller, 3 holding: - nothing, ? unknown, or a token; 4 place in the
-- queue, 0 for none; 5 1 on a standalone server.
local values = redis.call('MGET', KEYS[1], KEYS[3])
local owner, fence = values[1], values[2]
local head = redis.call('ZRANGE', KEYS[2], '0', '0')[1]

-- The usual cases, before so much as a function is made: it is the caller's, and nobody watches.
if owner == ARGV[1] and fence == ARGV[3] .. ' ' .. ARGV[2] and ARGV[4] == '0' and head ~= owner then
  -- Nobody waits for it.
  if not head then
    redis.call('DEL', KEYS[1])
    return 1
  end
  -- The first in the queue is one of ours, alive, and listens.
  local ends, now = redis.pcall('ZSCORE', KEYS[4], head), redis.call('TIME')
  local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
  if type(ends) == 'string' and tonumber(ends) > now_ms and string.sub(ends, -2) == '.5' then
    redis.call('DEL', KEYS[1])
    redis.call('ZREM', KEYS[2], head)
    redis.call('ZREM', KEYS[4], head)
    local heard = redis.call('PUBLISH', KEYS[1] .. ':' .. head, 'released@@' .. owner)
    if heard > 0 or ARGV[5] ~= '1' then
      local promise = string.format('!%.0f %s ', now_ms + TURN, ARGV[3]) .. head
      redis.call('SET', KEYS[3], promise, 'PX', FENCE_KEPT)
      -- The one behind it looks when the promise is over, as in `tell_next`.
      for _, next in ipairs(redis.call('ZRANGE', KEYS[2], '0', ARGV[5] == '1' and '7' or '0')) do
        if redis.call('ZSCORE', KEYS[4], next)
          and redis.call('PUBLISH', KEYS[1] .. ':' .. next, 'next@@' .. owner) > 0 then break end
      end
      return 1
    end
    -- It is gone, so the rest goes on with the next.
    head = redis.call('ZRANGE', KEYS[2], '0', '0')[1]
  end
end

