-- A week, in words: the server turns a number into text slowly.
local FENCE_KEPT = '604800000'

