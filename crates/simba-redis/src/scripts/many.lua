-- The usual cases of many calls: a call of a script costs the server as much as all that it does for one of them, and
-- a command about all of them hardly more than about one.
-- KEYS: mutex and fence of each renewal, of each release; fence of each first look; queue of each release, of each
-- first look; mutex of each first look. ARGV: how many renewals, releases and first looks; caller and lease in ms of
-- each renewal; token and caller of each release; caller and lease in ms of each first look: where the caller is what
-- the fence says of it, 29 characters and its id.
-- Returns for each, in this order, what its own script would (the token as text or a number, 1 for a release), or
-- false where it is not the usual case: nothing was done, and it is to be called by itself; after an error, each is, whatever was
-- done. No function is made.
local call, sub, byte = redis.call, string.sub, string.byte
local PROMISED = byte('!')
local renewals = tonumber(ARGV[1])
local held = renewals + tonumber(ARGV[2])
local all = held + tonumber(ARGV[3])
local replies, word = {}, 4
-- Before the queue of a release or a first look, and before the mutex of a first look.
local queues = held + all - renewals
local mutexes = queues + all - held

local values = call('MGET', unpack(KEYS, 1, held + all))
local waited = all > renewals and call('EXISTS', unpack(KEYS, held + all + 1, queues + all)) > 0
local now = call('TIME')
local stamp = now[1] .. (#now[2] == 6 and now[2] or sub('00000' .. now[2], -6))
local token = tonumber(stamp)
-- A fence whose token begins like the time was given its end within the last 1000 s.
local era = sub(stamp, 1, 7)

for n = 1, renewals do
  local key, caller = 2 * n - 1, ARGV[word]
  local last, reply = values[key + 1], false
  if last and values[key] == sub(caller, 30) and sub(last, 18) == caller then
    call('PEXPIRE', KEYS[key], ARGV[word + 1])
    -- The first renewal after every 1000 s extends the fence. Two renewals are less than a lease apart.
    if token % 1000000000 < ARGV[word + 1] * 1000 then call('PEXPIRE', KEYS[key + 1], FENCE_KEPT) end
    reply = sub(last, 1, 16)
  end
  replies[n], word = reply, word + 2
end

local gone, freed = {}, 0
for n = renewals + 1, held do
  local key, last, reply = 2 * n - 1, ARGV[word], false
  if values[key + 1] == last and values[key] == sub(last, 47)
    and not (waited and call('EXISTS', KEYS[queues + n]) > 0) then
    freed = freed + 1
    gone[freed] = KEYS[key]
    reply = 1
  end
  replies[n], word = reply, word + 1
end
if freed > 0 then call('DEL', unpack(gone)) end

for n = held + 1, all do
  local mutex, caller, last, reply = KEYS[mutexes + n], ARGV[word], values[held + n], false
  local id = sub(caller, 30)
  -- Neither promised, nor ahead of a clock that went back. Servers differ in what comes before a digit.
  if (not last or byte(last) ~= PROMISED and last < stamp) and not (waited and call('EXISTS', KEYS[queues + n]) > 0)
    and call('SET', mutex, id, 'NX', 'PX', ARGV[word + 1]) then
    local fence = stamp .. ' ' .. caller
    -- In place if it can be, which leaves its end as it is.
    local swapped = last and #last == #fence and sub(last, 1, 7) == era
      and redis.pcall('SETRANGE', KEYS[held + n], '0', fence)
    if type(swapped) ~= 'number' then call('SET', KEYS[held + n], fence, 'PX', FENCE_KEPT) end
    call('PUBLISH', mutex, 'acquired@@' .. id)
    reply = token
  end
  replies[n], word = reply, word + 2
end
return replies
