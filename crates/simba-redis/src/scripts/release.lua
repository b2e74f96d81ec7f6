-- Releases the mutex if the caller holds it, leaves the queue, and wakes the next waiter if the mutex is free.
--
-- KEYS: 1 mutex, 2 queue, 3 fence, 4 alive.
-- ARGV: 1 contender id; 2 caller; 3 what it holds: `nothing`, `unknown`, or a token; 4 its position in the queue, 0 for
--   none; 5 1 on a standalone server.
-- Reply: 1 if the mutex was released, 0 if not.
local id, caller, holding, position, standalone = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5] == '1'
local values = redis.call('MGET', KEYS[1], KEYS[3])
local owner, fence, waiters = values[1], values[2], redis.call('ZRANGE', KEYS[2], '0', '1')
local head, another = waiters[1], waiters[2]
local unobserved = fence == holding .. HOLD .. caller

-- Usual cases, before the shared functions, whose definition costs time. The caller holds the mutex, has no position,
-- there are no observers, and: there is no waiter; or there is one, which is ours, alive, and receives the message.
-- All else is the general case, after them.
if owner == id and unobserved and position == '0' and not another and head ~= id then
  if not head then
    redis.call('DEL', KEYS[1])
    return 1
  end
  local time = redis.call('TIME')
  local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
  -- `pcall`: if the key holds something else, the general case releases the mutex before it fails.
  local ends = tonumber(redis.pcall('ZSCORE', KEYS[4], head) or nil)
  if ends and ends > now_ms and ends % 1 == SUBSCRIBED then
    redis.call('DEL', KEYS[1])
    -- As in `wake_next`. Without a receiver, the general case goes on, and nothing that was done here is in its way.
    if redis.call('PUBLISH', KEYS[1] .. ':' .. head, 'released@@' .. id) > 0 or not standalone then
      redis.call('ZREM', KEYS[2], head)
      redis.call('ZREM', KEYS[4], head)
      local ends_ms = string.format('%.0f ', now_ms + RESERVED_MS)
      redis.call('SET', KEYS[3], RESERVATION .. ends_ms .. holding .. ' ' .. head, 'PX', FENCE_KEPT)
      return 1
    end
  end
end

-- include shared.lua
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local last, reserved_for = parse_reservation(fence, now_ms)
-- Without a fence, only the caller knows whether it holds.
local ours = owner == id and (is_hold_of(last, caller) or is_lost(last))
local freed = ours and (holding == 'unknown' or last and holding == string.sub(last, 1, TOKEN_LENGTH))
if position ~= '0' or head == id then
  remove_waiter(id)
  head = first_waiter()
end
if freed then
  redis.call('DEL', KEYS[1])
  if not unobserved then redis.call('PUBLISH', KEYS[1] .. ':owner', 'released@@' .. id) end
end
if reserved_for and (freed or reserved_for == id) then
  redis.call('SET', KEYS[3], last, 'PX', FENCE_KEPT)
  reserved_for = nil
end
-- Also if it was free before: a wake-up that the caller no longer needs is passed on.
if not reserved_for and (freed or not owner) then wake_next(last, head, id, nil, now_ms, standalone) end
return freed and 1 or 0
