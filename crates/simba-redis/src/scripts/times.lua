-- How long things last, in ms. FENCE_KEPT comes before this: the retention of the handle and the 1000 s that the end of
-- a fence may be set late.
-- The promise to a waiter that was woken: a second, so that a busy machine costs no waiter its turn. The waiter behind
-- it is told, and looks when the promise is over: one that is killed just then keeps it out for no longer. One that could not subscribe in time is most likely gone; should it come all
-- the same, it still has its place. A JVM peer says nothing in the fence when it wins, so its promise must not outlast
-- its hold.
local TURN, TURN_UNHEARD, TURN_OF_PEER = 1000, 30, 30
