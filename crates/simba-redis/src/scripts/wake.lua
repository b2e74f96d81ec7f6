-- What the scripts share. KEYS: 1 mutex, 2 queue, 3 fence, 4 alive.

-- More than anyone has in a queue, and still done within milliseconds.
local MOST_DEAD = 5000

-- The fence holds the last token, in 16 digits, and whose it is: "<token> <session> <transition ms> <contender>", with
-- a * behind the token if somebody wants to be told of the release. Anything else counts as none.
local function read_fence(text)
  if not text then return nil end
  local token, transition, holder = string.match(text, '^(%d+)[ *]%x+ (%d+) (.+)$')
  if not token or tonumber(token) >= 9007199254740991 then return nil end
  return token, transition, holder
end

-- A free mutex may be promised to a waiter for a moment: then the fence is "!<end in ms> <last token> <waiter>".
-- Returns the fence without the promise, and the waiter if it is within its moment.
local function read_promise(text, now_ms)
  local ends, token, waiter = string.match(text or '', '^!(%d+) (%d+) (.*)$')
  if not ends then return text end
  local left = ends - now_ms
  return token, left > 0 and left <= TURN and waiter or nil
end

-- Whether it is not known whose hold the last was. A promise and what is left of one say that it was given back.
local function is_lost(fence)
  return not read_fence(fence) and not string.match(fence or '', '^%d+$')
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

-- Tells the first live waiter of ours behind the one that was woken, so that it looks when the promise is over: the woken
-- one may not come. Only a standalone server knows who is alive.
local function tell_next(by, standalone)
  for _, next in ipairs(redis.call('ZRANGE', KEYS[2], '0', standalone and '7' or '0')) do
    if redis.call('ZSCORE', KEYS[4], next)
      and redis.call('PUBLISH', KEYS[1] .. ':' .. next, 'next@@' .. by) > 0 then return end
  end
end

-- Wakes the first live waiter of a free mutex, from `head` up to `last`, and promises it the mutex for a moment. It
-- leaves the queue: a waiter that finds itself outside knows that it was woken, and one that does not come blocks
-- nobody after its turn. Returns for how many ms the mutex is promised, false if there was no waiter.
local function wake_next(fence, head, by, last, now_ms, standalone)
  for _ = 1, MOST_DEAD do
    if not head or head == last then return false end
    redis.call('ZREM', KEYS[2], head)
    -- Ours are in `alive`, with the end of their place; a half more if they listen.
    local ends = tonumber(redis.call('ZSCORE', KEYS[4], head) or nil)
    redis.call('ZREM', KEYS[4], head)
    if not (ends and ends <= now_ms) then
      local heard = redis.call('PUBLISH', KEYS[1] .. ':' .. head, 'released@@' .. by)
      local unheard = ends and ends % 1 == 0
      -- Only a standalone server knows all who listen.
      if not (standalone and heard == 0 and not unheard) then
        local turn = unheard and TURN_UNHEARD or ends and TURN or TURN_OF_PEER
        local token = string.match(fence or '', '^%d+') or '0'
        redis.call('SET', KEYS[3], string.format('!%.0f %s ', now_ms + turn, token) .. head, 'PX', FENCE_KEPT)
        if unheard then
          -- It may have died before it could listen: let the next one look until the turn is over.
          local next = first()
          if next and next ~= last then
            redis.call('PUBLISH', KEYS[1] .. ':' .. next, 'released@@' .. by)
          end
        else
          tell_next(by, standalone)
        end
        return turn
      end
    end
    head = first()
  end
  return false
end
