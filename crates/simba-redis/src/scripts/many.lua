-- The usual cases of many calls: a call of a script costs the server as much as all that it does for one of them, and
-- a command about all of them hardly more than about one.
-- KEYS: mutex and fence of each renewal, of each release, of each first look; queue and turn of each release, of each
-- first look. ARGV: how many renewals, releases and first looks; caller and lease in ms of each renewal; token and
-- caller of each release; caller and lease in ms of each first look: where the caller is what the fence says of it, 29
-- characters and its id.
-- Returns for each, in the order of the keys, what its own script would (the token as text, 1 for a release), or false
-- where it is not the usual case: nothing was done, and it is to be called by itself; after an error, each is, whatever
-- was done. No function is made.
local call, sub = redis.call, string.sub
local renewals = tonumber(ARGV[1])
local held = renewals + tonumber(ARGV[2])
local all = held + tonumber(ARGV[3])
local replies, word = {}, 4

local values = held > 0 and call('MGET', unpack(KEYS, 1, 2 * held))
-- Queue and turn of a call stand this far behind its mutex and its fence.
local behind = 2 * (all - renewals)
local waited = behind > 0 and call('EXISTS', unpack(KEYS, 2 * all + 1)) > 0

for n = 1, renewals do
  local key, caller = 2 * n - 1, ARGV[word]
  local last, reply = values[2 * n], false
  if last and values[key] == sub(caller, 30) and sub(last, 18) == caller then
    call('PEXPIRE', KEYS[key], ARGV[word + 1])
    call('PEXPIRE', KEYS[key + 1], FENCE_KEPT)
    reply = sub(last, 1, 16)
  end
  replies[n], word = reply, word + 2
end

local gone, ids, freed = {}, {}, 0
for n = renewals + 1, held do
  local key, last, reply = 2 * n - 1, ARGV[word], false
  local id = sub(last, 47)
  if values[key] == id and values[key + 1] == last
    and not (waited and call('EXISTS', KEYS[key + behind], KEYS[key + behind + 1]) > 0) then
    freed = freed + 1
    gone[freed], ids[freed] = KEYS[key], id
    reply = 1
  end
  replies[n], word = reply, word + 1
end
if freed > 0 then call('DEL', unpack(gone)) end
for n = 1, freed do call('PUBLISH', gone[n] .. ':owner', 'released@@' .. ids[n]) end

local stamp
for n = held + 1, all do
  local key, caller, reply = 2 * n - 1, ARGV[word], false
  local mutex, id = KEYS[key], sub(caller, 30)
  if not (waited and call('EXISTS', KEYS[key + behind], KEYS[key + behind + 1]) > 0)
    and call('SET', mutex, id, 'NX', 'PX', ARGV[word + 1]) then
    if not stamp then
      local now = call('TIME')
      stamp = now[1] .. (#now[2] == 6 and now[2] or sub('00000' .. now[2], -6))
    end
    local last = redis.pcall('SET', KEYS[key + 1], stamp .. ' ' .. caller, 'PX', FENCE_KEPT, 'GET')
    if not last or type(last) == 'string' and last < stamp then
      call('PUBLISH', mutex, 'acquired@@' .. id)
      reply = stamp
    else
      -- The clock went back, or the fence is nothing that this server can swap.
      if type(last) == 'string' then call('SET', KEYS[key + 1], last, 'PX', FENCE_KEPT) end
      call('DEL', mutex)
    end
  end
  replies[n], word = reply, word + 2
end
return replies
