-- What the scripts share. KEYS: 1 mutex, 2 queue, 3 fence, 4 alive, 5 turn.

-- How long a woken waiter is waited for, in ms. One that could not subscribe in time is most likely gone; should it
-- come all the same, it still has its place. A JVM peer sets no value here when it wins, so its promise must not
-- outlast its hold.
local TURN, TURN_UNHEARD, TURN_OF_PEER = 100, 30, 30
-- More than anyone has in a queue, and still done within milliseconds.
local MOST_DEAD = 5000

-- The fence holds the last token, in 16 digits, and whose it is: "<token> <session> <transition ms> <contender>".
-- Anything else counts as none.
local function read_fence(text)
  if not text then return nil end
  local token, transition, holder = string.match(text, '^(%d+) %x+ (%d+) (.+)$')
  if not token or tonumber(token) >= 9007199254740991 then return nil end
  return token, transition, holder
end

-- The store's time in microseconds.
local function microseconds()
  local now = redis.call('TIME')
  return now[1] * 1000000 + now[2]
end

-- The first in the queue, if there is one.
local function first()
  return redis.call('ZRANGE', KEYS[2], '0', '0')[1]
end

-- Wakes the first live waiter of a free mutex, from `head` up to `last`, and promises it the mutex for a moment. It
-- leaves the queue: a waiter that finds itself outside knows that it was woken, and one that does not come blocks
-- nobody after its turn. Returns whether there was one.
local function wake_next(head, by, last, now_ms, standalone)
  for _ = 1, MOST_DEAD do
    if not head or head == last then return false end
    redis.call('ZREM', KEYS[2], head)
    -- Ours are in `alive`, with the end of their place; a half more if they listen.
    local ends = tonumber(redis.call('ZSCORE', KEYS[4], head) or nil)
    if ends and ends <= now_ms then
      redis.call('ZREM', KEYS[4], head)
    else
      local heard = redis.call('PUBLISH', KEYS[1] .. ':' .. head, 'released@@' .. by)
      local unheard = ends and ends % 1 == 0
      -- Only a standalone server knows all who listen.
      if standalone and heard == 0 and not unheard then
        redis.call('ZREM', KEYS[4], head)
      else
        local turn = unheard and TURN_UNHEARD or ends and TURN or TURN_OF_PEER
        redis.call('SET', KEYS[5], head, 'PX', turn)
        if unheard then
          -- It may have died before it could listen: let the next one look until the turn is over.
          local next = first()
          if next and next ~= last then
            redis.call('PUBLISH', KEYS[1] .. ':' .. next, 'released@@' .. by)
          end
        end
        return true
      end
    end
    head = first()
  end
  return false
end
