-- Runs the usual cases of many calls. Starting a script costs the server as much as the work for one call, and a command
-- with the keys of all calls hardly more than one with the keys of a single call.
--
-- KEYS: mutex and fence of each renewal, then of each release; fence of each acquisition; queue of each release, then of
--   each acquisition; mutex of each acquisition.
-- ARGV: number of renewals, of releases, of acquisitions; then for each renewal its caller and lease in ms, for each
--   release the hold as it is in the fence, for each acquisition its caller and lease in ms.
-- Reply: for each call, in this order, the result of its own script (the token as text or number, 1 for a release), or
--   false: nothing was done, since the call is not the usual case, and it has to be repeated alone. After an error all
--   calls are repeated alone, whatever was done.
-- No function is defined, since that costs time.
local call, sub, byte = redis.call, string.sub, string.byte
local renewals = tonumber(ARGV[1])
local held = renewals + tonumber(ARGV[2])
local all = held + tonumber(ARGV[3])
-- Index of the next argument.
local at = 4
-- KEYS[fences + n] is the fence of the acquisition n, KEYS[queues + n] the queue of the release or acquisition n,
-- KEYS[mutexes + n] the mutex of the acquisition n. Calls are numbered from 1 to `all`.
local fences = held
local queues = fences + all - renewals
local mutexes = queues + all - held

local values = call('MGET', unpack(KEYS, 1, fences + all))
local any_waiters = all > renewals and call('EXISTS', unpack(KEYS, fences + all + 1, queues + all)) > 0
local time = call('TIME')
local token_text = time[1] .. sub('00000' .. time[2], -6)
local token = tonumber(token_text)
local replies = {}

for n = 1, renewals do
  local key, caller, lease = 2 * n - 1, ARGV[at], ARGV[at + 1]
  local owner, fence, reply = values[key], values[key + 1], false
  if fence and owner == sub(caller, CONTENDER_IN_CALLER) and sub(fence, CALLER_AT) == caller then
    call('PEXPIRE', KEYS[key], lease)
    -- The first renewal after every 1000 s extends the fence. Two renewals are less than a lease apart.
    if token % 1000000000 < lease * 1000 then call('PEXPIRE', KEYS[key + 1], FENCE_KEPT) end
    reply = sub(fence, 1, TOKEN_LENGTH)
  end
  replies[n], at = reply, at + 2
end

local released = {}
for n = renewals + 1, held do
  local key, hold, reply = 2 * n - 1, ARGV[at], false
  local owner, fence = values[key], values[key + 1]
  if fence == hold and owner == sub(hold, CONTENDER_AT) and not (any_waiters and call('EXISTS', KEYS[queues + n]) > 0) then
    released[#released + 1], reply = KEYS[key], 1
  end
  replies[n], at = reply, at + 1
end
if #released > 0 then call('DEL', unpack(released)) end

-- The expiry of a fence whose token begins like the time was set within the last 1000 s.
local era, reserved = sub(token_text, 1, 7), byte(RESERVATION)
for n = held + 1, all do
  local mutex, caller, lease, fence, reply = KEYS[mutexes + n], ARGV[at], ARGV[at + 1], values[fences + n], false
  local id = sub(caller, CONTENDER_IN_CALLER)
  -- Not reserved, and the last token is not ahead of a clock that was set back. The reservation is checked by its first
  -- byte, since the locale decides whether it is less than a digit.
  if (not fence or byte(fence) ~= reserved and fence < token_text)
    and not (any_waiters and call('EXISTS', KEYS[queues + n]) > 0) and call('SET', mutex, id, 'NX', 'PX', lease) then
    local hold = token_text .. HOLD .. caller
    -- Overwritten in place if possible, which keeps the expiry.
    local swapped = fence and #fence == #hold and sub(fence, 1, 7) == era
      and redis.pcall('SETRANGE', KEYS[fences + n], '0', hold)
    if type(swapped) ~= 'number' then call('SET', KEYS[fences + n], hold, 'PX', FENCE_KEPT) end
    call('PUBLISH', mutex, 'acquired@@' .. id)
    reply = token
  end
  replies[n], at = reply, at + 2
end
return replies
