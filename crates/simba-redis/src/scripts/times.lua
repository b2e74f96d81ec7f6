-- How long things last, in ms. The fence: a week and the 28 hours that its end may be late, in words, since the server
-- turns a number into text slowly.
local FENCE_KEPT = '704800000'
-- The promise to a waiter that was woken. One that could not subscribe in time is most likely gone; should it come all
-- the same, it still has its place. A JVM peer says nothing in the fence when it wins, so its promise must not outlast
-- its hold.
local TURN, TURN_UNHEARD, TURN_OF_PEER = 100, 30, 30
