-- Takes the mutex, renews it, or tells who has it.
-- ARGV: 1 contender, 2 what the fence says of the caller, 3 lease ms, 4 prior: - nothing and no place, ~ nothing,
-- ? unknown, + held, or the token that lapsed; 5 in words: intent (t tries, f looks for the first time and is told its
-- place, e enters the queue there, q was in the queue; in upper case on a standalone server), place in the queue in µs
-- or 0 for none, ms that a place lasts, with .5 if the waiter listens.
-- Returns the token as text or {1, token}, {0, place, ms left, token or 0, owner}, or {2, place, ms}: nobody has it, and
-- it is promised to another. The ms are 0, unless this call promised it to one that is most likely gone: to a peer, where
-- nobody knows who listens.
-- The queue is kept for an hour or twenty leases.
local QUEUE_KEPT = 3600000
local id, lease, prior = ARGV[1], ARGV[3], ARGV[4]
local intent, place, lasts = string.match(ARGV[5], '^(%a) (%d+) (.+)$')

-- Writes the next token down: the store's time, which goes on when the fence is lost, and more than the last.
local function next_token(fence, now, mark)
  local last = fence and tonumber(string.sub(fence, 1, 16)) or 0
  if not (last > 0 and last < 9007199254740991) then last = 0 end
  local fresh = math.max(last + 1, now)
  redis.call('SET', KEYS[3], string.format('%016.0f', fresh) .. mark .. ARGV[2], 'PX', FENCE_KEPT)
  return fresh
end

local now = now[1] * 1000000 + now[2]
local now_ms = math.floor(now / 1000)
local fence, turn = read_promise(fence, now_ms)

if owner == id then
  -- Another session under the same id is a stranger; without a fence only the caller can tell.
  local ours = fence and string.sub(fence, 18) == ARGV[2]
  if ours or prior ~= '-' and prior ~= '~' and is_lost(fence) then
    redis.call('PEXPIRE', KEYS[1], lease)
    local token = ours and string.sub(fence, 1, 16)
    -- Nothing is published here, so whoever wants to be told of the release may have said so before.
    if not ours or prior == token then return {1, next_token(fence, now, '*')} end
    redis.call('PEXPIRE', KEYS[3], FENCE_KEPT)
    return {1, tonumber(token)}
  end
end

local place, kind = tonumber(place), string.lower(intent)
local promised
if not owner then
  -- Who had a place and has none now was woken: nobody before it waits.
  local woken = turn == id or kind == 'q' and not redis.call('ZSCORE', KEYS[2], id)
  local head = not woken and first()
  promised = not woken and not turn and wake_next(fence, head, id, id, now_ms, kind ~= intent)
  if woken or not turn and not promised then
    if not redis.call('SET', KEYS[1], id, 'NX', 'PX', lease) then
      return redis.error_reply('WRONGTYPE the key of the mutex holds no text')
    end
    if head or place > 0 then
      redis.call('ZREM', KEYS[2], id)
      redis.call('ZREM', KEYS[4], id)
    end
    local fresh = next_token(fence, now, ' ')
    redis.call('PUBLISH', KEYS[1], 'acquired@@' .. id)
    return {1, fresh}
  end
end

if kind == 'f' then place = now end
if (kind == 'e' or kind == 'q') and owner ~= id then
  -- In seconds, as JVM peers count; they cut theirs off, so ours begin half a second earlier.
  redis.call('ZADD', KEYS[2], 'NX', string.format('%.6f', place / 1000000 - 0.5), id)
  redis.call('ZADD', KEYS[4], string.format('%.1f', now_ms + tonumber(lasts)), id)
  local kept = math.max(QUEUE_KEPT, 20 * lease)
  redis.call('PEXPIRE', KEYS[2], kept)
  redis.call('PEXPIRE', KEYS[4], kept)
end
if not owner then return {2, place, promised == TURN_OF_PEER and kind == intent and promised or 0} end
local token, _, holder = read_fence(fence)
return {0, place, redis.call('PTTL', KEYS[1]), owner == holder and tonumber(token) or 0, owner}
