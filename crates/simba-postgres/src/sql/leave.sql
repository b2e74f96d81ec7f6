-- Deletes the queue entry in any case, and changes the row so that a concurrent release sees the deletion. Returns
-- whether the mutex is free and may have a waiter. A locked row is not changed and returns nothing: the statement is
-- repeated until it does.
WITH due AS (
    SELECT h.mutex FROM {mutex} h WHERE {unsynced} AND h.mutex = $1 FOR NO KEY UPDATE SKIP LOCKED
), mutex_row AS (
    UPDATE {mutex} m SET waited = CASE WHEN m.waited > 0 THEN m.waited + 1 ELSE m.waited - 1 END
    FROM due WHERE m.mutex = $1
    RETURNING m.until <= clock_timestamp() AND m.waited > 0 AS wakes
), deleted AS (
    DELETE FROM {waiter} w WHERE w.mutex = $1 AND w.session = $2
)
SELECT wakes FROM mutex_row
