-- Layout of the stored values, prepended to every script.
--
-- The fence, `simba:{<mutex>}:fence`, has one of these forms. Any other text counts as no fence.
--
-- | form        | text                                             | meaning                                           |
-- |-------------|--------------------------------------------------|---------------------------------------------------|
-- | hold        | <token><mark><session> <transition> <contender>  | the last acquisition; kept after its release      |
-- | reservation | !<end> <token> <waiter>                          | free; only <waiter> may acquire it until <end>    |
-- | token       | <token>                                          | free; the reservation was cancelled               |
--
-- | part        | text                                                                                                 |
-- |-------------|------------------------------------------------------------------------------------------------------|
-- | token       | the last fencing token, 16 digits; 0 in a reservation without a last token                           |
-- | mark        | a space, or * if observers want the release published                                                |
-- | session     | random number of the session, 16 hexadecimal digits                                                  |
-- | transition  | of the lease, in ms, 11 digits                                                                       |
-- | contender   | id of the holder                                                                                     |
-- | end         | server time in ms, 13 digits                                                                         |
-- | waiter      | id of the woken waiter                                                                               |
--
-- `<session> <transition> <contender>` is the caller: scripts get it as an argument and compare it as a whole.
-- `simba:{<mutex>}:contender` has the waiters, with their position as score. `simba:{<mutex>}:alive` has the expiry of
-- our waiters' entries as score: server time in ms, plus 0.5 if the waiter has subscribed. JVM waiters have none.
local RESERVATION, HOLD, OBSERVED_HOLD = '!', ' ', '*'
local RESERVATION_PATTERN = '^!(%d+) (%d+) (.*)$'
-- Positions of the first character of parts of a hold, of the contender in the caller, and the length of a token.
local MARK_AT, CALLER_AT, CONTENDER_AT, CONTENDER_IN_CALLER, TOKEN_LENGTH = 17, 18, 47, 30, 16
local SUBSCRIBED = 0.5
-- The largest integer that Lua represents exactly. A larger token is not ours.
local MAX_TOKEN = 9007199254740991
-- For how long a fence is kept after a use, in ms: the retention of the handle, plus 1000 s by which `many.lua` may
-- extend it late. As text, since converting a number to text is slow.
local FENCE_KEPT = '$FENCE_KEPT'
-- Reservation for a woken waiter: a second, so that no waiter loses its turn on a busy machine.
local RESERVED_MS = 1000
-- Reservation for a JVM peer or a waiter that has not subscribed. A JVM peer does not write the fence when it acquires,
-- so the reservation must not outlast its hold. A waiter that could not subscribe in time is probably dead; if it is
-- alive, it still has its position.
local SHORT_RESERVATION_MS = 30
