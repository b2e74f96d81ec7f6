-- Acquires the mutex if it is free and no live waiter is before this session, and deletes the queue entry. Otherwise
-- returns the holder, the queue entry, and whether only a locked row prevented the acquisition. Only an acquired or
-- renewed mutex has a number of watchers. Finds the locked row as take does.
WITH due AS (
    SELECT $2::text AS owner, $3::text AS session, $4::float8 AS ttl, $5::float8 AS total, $6::bigint AS lapsed,
        h.ctid AS tid
    FROM {mutex} h WHERE {synced} AND h.mutex = $1 AND ({turn})
    FOR NO KEY UPDATE SKIP LOCKED
), took AS (
    UPDATE {mutex} m SET {lease},
        -- A concurrent release sees that the queue changed.
        waited = CASE WHEN m.waited > 0 THEN m.waited + 1 ELSE m.waited - 1 END
    FROM due WHERE m.mutex = $1 AND m.ctid = due.tid
    RETURNING m.owner, m.session, m.token, m.until, m.watched
), deleted AS (
    DELETE FROM {waiter} w USING took WHERE w.mutex = $1 AND w.session = $3
)
SELECT owner, session, token, until, clock_timestamp(), NULL::timestamptz, watched, NULL::text, false
FROM took
UNION ALL
SELECT h.owner, h.session, h.token, h.until, clock_timestamp(), o.until, NULL::bigint, o.channel, {turn}
FROM {mutex} h LEFT JOIN {waiter} o ON o.mutex = h.mutex AND o.session = $3
WHERE h.mutex = $1 AND NOT EXISTS (SELECT FROM took)
