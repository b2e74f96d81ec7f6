-- Tells who owns the mutex. ARGV: 1 1 to count who waits for it, 2 1 to be told of its release.
-- Returns {waiters} or {waiters, ms left, token or 0, transition ms, owner}.
local owner, fence = redis.call('GET', KEYS[1]), redis.call('MGET', KEYS[3])[1]
local token, transition, holder = read_fence(fence)
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
if ARGV[2] == '1' and known and string.sub(fence, 17, 17) == ' ' then
  -- Where nothing can be written, nobody is told, and the next look finds it out.
  redis.pcall('SETRANGE', KEYS[3], '16', '*')
end
return {waiters, redis.call('PTTL', KEYS[1]), known and tonumber(token) or 0, known and tonumber(transition) or 0, owner}
