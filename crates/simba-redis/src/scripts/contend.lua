-- Acquires the mutex, renews it, or returns its holder.
--
-- KEYS: 1 mutex, 2 queue, 3 fence, 4 alive.
-- ARGV: 1 contender id; 2 caller; 3 lease in ms; 4 what the caller held before: `nothing` and it has no position,
--   `position` for nothing but a position, `unknown`, `held`, `renew` for a hold that may be renewed but not acquired
--   again, or the token that lapsed; 5 separated by spaces: intent, 1 on a standalone server, position in the queue in
--   µs or 0, lifetime of the entry in ms, 1 if it has subscribed.
--   Intents: `try`, `first` (assigns a position), `enter` the queue, `queued` (has entered it before).
-- Reply: the token as text, or {1, token}: the caller holds the mutex.
--   {0, position, ms left, token or 0, owner}: another one holds it.
--   {2, position, ms}: it is free, but reserved for another waiter. The ms are 0, unless this call reserved it for a
--   waiter that is probably dead: a JVM peer or a waiter that has not subscribed, not on a standalone server.
local id, caller, lease, prior = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local values, time = redis.call('MGET', KEYS[1], KEYS[3]), redis.call('TIME')
local owner, fence = values[1], values[2]

-- Usual cases, before the shared functions, whose definition costs time. The mutex is free, the last token is not ahead
-- of the clock, and: it is the first call, and there is no waiter; or the mutex is reserved for the caller.
local may_acquire = not owner and prior ~= 'renew'
if may_acquire then
  local token = time[1] .. string.sub('00000' .. time[2], -6)
  local ends, last, waiter = string.match(fence or '', RESERVATION_PATTERN)
  local woken = waiter == id and last < token and ends > string.sub(token, 1, 13)
  local first = prior == 'nothing' and not ends and not (fence and fence >= token) and redis.call('EXISTS', KEYS[2]) == 0
  if (woken or first) and redis.call('SET', KEYS[1], id, 'NX', 'PX', lease) then
    redis.call('SET', KEYS[3], token .. HOLD .. caller, 'PX', FENCE_KEPT)
    -- The call that woke it has removed its entries, or at least the one in the queue. It may have entered again.
    if woken and redis.call('ZREM', KEYS[4], id) > 0 then redis.call('ZREM', KEYS[2], id) end
    redis.call('PUBLISH', KEYS[1], 'acquired@@' .. id)
    return token
  end
end

-- include shared.lua
-- The queue expires after an hour or twenty leases, whichever is longer.
local QUEUE_KEPT = 3600000
local now_us = time[1] * 1000000 + time[2]
local now_ms = math.floor(now_us / 1000)
local last, reserved_for = parse_reservation(fence, now_ms)
local intent, standalone, position, lifetime, subscribed = string.match(ARGV[5], '^(%a+) (%d) (%d+) (%d+) (%d)$')
position, standalone = tonumber(position), standalone == '1'

-- Stores and returns the next token: the server's time, which also grows if the fence was lost, or the last token + 1.
local function store_next_token(mark)
  local token = tonumber(string.sub(last or '', 1, TOKEN_LENGTH)) or 0
  if not (token > 0 and token < MAX_TOKEN) then token = 0 end
  token = math.max(token + 1, now_us)
  redis.call('SET', KEYS[3], string.format('%016.0f', token) .. mark .. caller, 'PX', FENCE_KEPT)
  return token
end

if owner == id then
  local ours = is_hold_of(last, caller)
  -- Without a fence, only the caller knows whether it holds.
  if ours or prior ~= 'nothing' and prior ~= 'position' and is_lost(last) then
    if not ours and prior == 'renew' then return redis.error_reply('FENCELOST the mutex is held without a fence') end
    redis.call('PEXPIRE', KEYS[1], lease)
    local token = ours and string.sub(last, 1, TOKEN_LENGTH)
    -- Observed: observers may have marked the old hold, and no event makes them mark the new one.
    if not ours or prior == token then return {1, store_next_token(OBSERVED_HOLD)} end
    redis.call('PEXPIRE', KEYS[3], FENCE_KEPT)
    return {1, tonumber(token)}
  end
end

local reserved_ms
if may_acquire then
  -- A queued waiter without an entry was woken, so no waiter precedes it.
  local woken = reserved_for == id or intent == 'queued' and not redis.call('ZSCORE', KEYS[2], id)
  reserved_ms = not woken and not reserved_for and wake_next(last, first_waiter(), id, id, now_ms, standalone)
  if woken or not reserved_for and not reserved_ms then
    if not redis.call('SET', KEYS[1], id, 'NX', 'PX', lease) then
      return redis.error_reply('WRONGTYPE the key of the mutex holds no text')
    end
    remove_waiter(id)
    local token = store_next_token(HOLD)
    redis.call('PUBLISH', KEYS[1], 'acquired@@' .. id)
    return {1, token}
  end
end

if intent == 'first' then position = now_us end
if (intent == 'enter' or intent == 'queued') and owner ~= id then
  -- In seconds, as JVM peers do. They truncate theirs, so ours are half a second less to be fair.
  redis.call('ZADD', KEYS[2], 'NX', string.format('%.6f', position / 1000000 - 0.5), id)
  redis.call('ZADD', KEYS[4], string.format('%.1f', now_ms + lifetime + (subscribed == '1' and SUBSCRIBED or 0)), id)
  local kept = math.max(QUEUE_KEPT, 20 * lease)
  redis.call('PEXPIRE', KEYS[2], kept)
  redis.call('PEXPIRE', KEYS[4], kept)
end
if not owner then return {2, position, reserved_ms == SHORT_RESERVATION_MS and not standalone and reserved_ms or 0} end
local token, _, holder = parse_hold(last)
return {0, position, redis.call('PTTL', KEYS[1]), owner == holder and tonumber(token) or 0, owner}
