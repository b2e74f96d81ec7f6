-- Functions of the scripts with these KEYS: 1 mutex, 2 queue, 3 fence, 4 alive.

-- Maximum number of dead waiters that one call skips: more than a queue has, and still done within milliseconds.
local MAX_DEAD = 5000

-- Returns token, transition and contender of a hold, or nil for another form of the fence.
local function parse_hold(fence)
  local token, transition, contender = string.match(fence or '', '^(%d+)[ *]%x+ (%d+) (.+)$')
  if token and tonumber(token) < MAX_TOKEN then return token, transition, contender end
end

-- Returns the fence without its reservation: a hold, a token, or other text. Returns as well the waiter that the mutex
-- is reserved for, if the reservation has not expired.
local function parse_reservation(fence, now_ms)
  local ends, token, waiter = string.match(fence or '', RESERVATION_PATTERN)
  if not ends then return fence end
  local left = ends - now_ms
  return token, left > 0 and left <= RESERVED_MS and waiter or nil
end

-- Returns whether the caller wrote this hold. Another session with the same contender id is another caller.
local function is_hold_of(fence, caller)
  return fence and string.sub(fence, CALLER_AT) == caller
end

-- Returns whether the last hold is unknown. A token, or a reservation, follows a release.
local function is_lost(fence)
  return not parse_hold(fence) and not string.match(fence or '', '^%d+$')
end

local function first_waiter()
  return redis.call('ZRANGE', KEYS[2], '0', '0')[1]
end

local function remove_waiter(id)
  redis.call('ZREM', KEYS[2], id)
  redis.call('ZREM', KEYS[4], id)
end

-- Publishes an event to a waiter, and returns the number of receivers.
local function publish_to(waiter, event, by)
  return redis.call('PUBLISH', KEYS[1] .. ':' .. waiter, event .. '@@' .. by)
end

-- Notifies our first live waiter behind the woken one, so that it contends after the reservation: the woken one may be
-- dead. Only a standalone server knows which waiters are alive.
local function notify_next(by, standalone)
  for _, waiter in ipairs(redis.call('ZRANGE', KEYS[2], '0', standalone and '7' or '0')) do
    if redis.call('ZSCORE', KEYS[4], waiter) and publish_to(waiter, 'next', by) > 0 then return end
  end
end

-- Wakes the first live waiter of a free mutex, from `waiter` up to but without `last`, and reserves the mutex for it. The waiter's
-- entry is removed: a waiter without an entry knows that it was woken, and a woken waiter that is dead blocks no other
-- after the reservation. `fence` is without a reservation, `by` is the caller's id.
-- Returns the duration of the reservation in ms, or false without a waiter.
local function wake_next(fence, waiter, by, last, now_ms, standalone)
  for _ = 1, MAX_DEAD do
    if not waiter or waiter == last then return false end
    local ends = tonumber(redis.call('ZSCORE', KEYS[4], waiter) or nil)
    remove_waiter(waiter)
    if not ends or ends > now_ms then
      local unsubscribed = ends and ends % 1 ~= SUBSCRIBED
      local receivers = publish_to(waiter, 'released', by)
      -- Only a standalone server knows all subscribers.
      if receivers > 0 or unsubscribed or not standalone then
        local reserved_ms = (unsubscribed or not ends) and SHORT_RESERVATION_MS or RESERVED_MS
        local token = string.match(fence or '', '^%d+') or '0'
        local reservation = RESERVATION .. string.format('%.0f ', now_ms + reserved_ms) .. token .. ' ' .. waiter
        redis.call('SET', KEYS[3], reservation, 'PX', FENCE_KEPT)
        local next = unsubscribed and first_waiter()
        if not unsubscribed then
          notify_next(by, standalone)
        elseif next and next ~= last then
          -- The woken waiter may have died before it subscribed: the next one polls until the reservation ends.
          publish_to(next, 'released', by)
        end
        return reserved_ms
      end
    end
    waiter = first_waiter()
  end
  return false
end
