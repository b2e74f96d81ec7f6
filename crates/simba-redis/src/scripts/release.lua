-- The rest of a release: not the usual case.
local id, holding, now_ms = ARGV[1], ARGV[3], math.floor(microseconds() / 1000)
local fence, turn = read_promise(fence, now_ms)
-- Another session under the same id is a stranger; without a fence only the caller can tell.
local ours = owner == id and (fence and string.sub(fence, 18) == ARGV[2] or is_lost(fence))
local freed = ours and (holding == '?' or fence and holding == string.sub(fence, 1, 16))
if ARGV[4] ~= '0' or head == id then
  redis.call('ZREM', KEYS[2], id)
  redis.call('ZREM', KEYS[4], id)
  head = first()
end
if freed then
  redis.call('DEL', KEYS[1])
  redis.call('PUBLISH', KEYS[1] .. ':owner', 'released@@' .. id)
end
if turn and (freed or turn == id) then
  redis.call('SET', KEYS[3], fence, 'PX', FENCE_KEPT)
  turn = nil
end
-- A wake-up that the caller does not want any more goes to the next.
if head and not turn and (freed or not owner) then
  wake_next(fence, head, id, nil, now_ms, ARGV[5] == '1')
end
return freed and 1 or 0
