-- The usual cases of many calls, one after the other, each about a mutex of its own: a call of a script costs the
-- server as much as all that it does for one of them. The keys and the words of a call follow those of the one before:
--   renewal: keys mutex, fence; words R, caller, lease ms
--   first look: keys mutex, fence, queue, turn; words F, caller, lease ms
--   release: keys mutex, fence, queue, turn; words L, token and caller
-- where the caller is what the fence says of it, 29 characters and its id. Returns for each what its own script would
-- (the token as text, 1 for a release), or false where it is not the usual case: nothing was done, and it is to be
-- called by itself. No function is made, and nothing is called that may fail for one and not for all.
local call, sub = redis.call, string.sub
local replies, key, word, stamp = {}, 1, 1, nil

for n = 1, #ARGV do
  local what = ARGV[word]
  if not what then break end
  local mutex, fence, caller, reply = KEYS[key], KEYS[key + 1], ARGV[word + 1], false
  if what == 'R' then
    local values = call('MGET', mutex, fence)
    local last = values[2]
    if last and values[1] == sub(caller, 30) and sub(last, 18) == caller then
      call('PEXPIRE', mutex, ARGV[word + 2])
      call('PEXPIRE', fence, FENCE_KEPT)
      reply = sub(last, 1, 16)
    end
    key, word = key + 2, word + 3
  elseif what == 'F' then
    local id = sub(caller, 30)
    if call('EXISTS', KEYS[key + 2], KEYS[key + 3]) == 0 and call('SET', mutex, id, 'NX', 'PX', ARGV[word + 2]) then
      if not stamp then
        local now = call('TIME')
        stamp = now[1] .. (#now[2] == 6 and now[2] or sub('00000' .. now[2], -6))
      end
      local last = redis.pcall('SET', fence, stamp .. ' ' .. caller, 'PX', FENCE_KEPT, 'GET')
      if not last or type(last) == 'string' and last < stamp then
        call('PUBLISH', mutex, 'acquired@@' .. id)
        reply = stamp
      else
        -- The clock went back, or the fence is nothing that this server can swap.
        if type(last) == 'string' then call('SET', fence, last, 'PX', FENCE_KEPT) end
        call('DEL', mutex)
      end
    end
    key, word = key + 4, word + 3
  else
    if call('EXISTS', KEYS[key + 2], KEYS[key + 3]) == 0 then
      local values = call('MGET', mutex, fence)
      local id = sub(caller, 47)
      if values[1] == id and values[2] == caller then
        call('DEL', mutex)
        call('PUBLISH', mutex .. ':owner', 'released@@' .. id)
        reply = 1
      end
    end
    key, word = key + 4, word + 2
  end
  replies[n] = reply
end
return replies
