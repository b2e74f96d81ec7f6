-- Returns the owner of the mutex.
--
-- KEYS: 1 mutex, 2 queue, 3 fence, 4 alive.
-- ARGV: 1 1 to count the waiters; 2 1 to have the release published to observers.
-- Reply: {waiters}, or {waiters, ms left, token or 0, transition in ms, owner}.
-- include shared.lua
local owner, fence = redis.call('GET', KEYS[1]), redis.call('MGET', KEYS[3])[1]
local token, transition, holder = parse_hold(fence)
local waiters = 0
if ARGV[1] == '1' then
  local time = redis.call('TIME')
  local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
  for _, id in ipairs(redis.call('ZRANGE', KEYS[2], 0, 9999)) do
    local ends = tonumber(redis.call('ZSCORE', KEYS[4], id) or nil)
    if id ~= owner and not (ends and ends <= now_ms) then waiters = waiters + 1 end
  end
end
if not owner then return {waiters} end
local known = owner == holder
if ARGV[2] == '1' and known and string.sub(fence, MARK_AT, MARK_AT) == HOLD then
  -- If the server refuses the write, the release is not published, and observers notice it at their next poll.
  redis.pcall('SETRANGE', KEYS[3], MARK_AT - 1, OBSERVED_HOLD)
end
return {waiters, redis.call('PTTL', KEYS[1]), known and tonumber(token) or 0, known and tonumber(transition) or 0, owner}
