-- Releases what the session holds under the token $3, if there is no waiter. A holder that saw no waiter tries this
-- first: the search for the next waiter makes release a third more expensive, even if it is not executed. Finds the
-- locked row as take does.
UPDATE {mutex} m SET {free} WHERE m.ctid = (
    SELECT h.ctid FROM {mutex} h
    WHERE {unsynced} AND h.mutex = $1 AND h.session = $2 AND h.token = $3 AND h.waited <= 0
    FOR NO KEY UPDATE SKIP LOCKED)
RETURNING $2::text, m.waited, m.waited, 0::bigint, m.watched
