-- Before all else, so that not even a function is made for it, the usual case of a release: the mutex is the caller's,
-- and nobody waits for it. The rest of the script tells what the arguments are.
if ARGV[4] == '0' then
  local values = redis.call('MGET', KEYS[1], KEYS[3])
  if values[1] == ARGV[1] and values[2] == ARGV[3] .. ' ' .. ARGV[2]
    and redis.call('EXISTS', KEYS[2], KEYS[5]) == 0 then
    redis.call('DEL', KEYS[1])
    redis.call('PUBLISH', KEYS[1] .. ':owner', 'released@@' .. ARGV[1])
    return 1
  end
end

