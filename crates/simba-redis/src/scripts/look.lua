-- Tells who owns the mutex, and how many wait for it if ARGV[1] is 1. Changes nothing.
-- Returns {waiters} or {waiters, ms left, token or 0, transition ms, owner}.
local owner = redis.call('GET', KEYS[1])
local token, transition, holder = read_fence(redis.call('GET', KEYS[3]))
local waiters = 0
if ARGV[1] == '1' then
  local now_ms = math.floor(microseconds() / 1000)
  for _, id in ipairs(redis.call('ZRANGE', KEYS[2], 0, 9999)) do
    local ends = tonumber(redis.call('ZSCORE', KEYS[4], id) or nil)
    if id ~= owner and not (ends and ends <= now_ms) then waiters = waiters + 1 end
  end
end
if not owner then return {waiters} end
local known = owner == holder
return {waiters, redis.call('PTTL', KEYS[1]), known and tonumber(token) or 0, known and tonumber(transition) or 0, owner}
