-- Creates or renews the queue entry and returns the holder, and whether the row was locked: then nothing was written.
-- Under the lock of the row: a later release sees that the queue changed, an earlier one is seen here. A lease that
-- seems to start in the future was set before a backward step of the server's clock: it is cut to its own length from
-- now, which is no earlier than its holder assumes.
WITH due AS (
    SELECT h.mutex FROM {mutex} h WHERE {unsynced} AND h.mutex = $1 FOR NO KEY UPDATE SKIP LOCKED
), mutex_row AS (
    UPDATE {mutex} m SET
        waited = CASE WHEN m.until > clock_timestamp() AND m.owner = $2 THEN m.waited ELSE abs(m.waited) + 1 END,
        until = least(m.until, clock_timestamp() + (m.until - m.renewed_at)),
        renewed_at = least(m.renewed_at, clock_timestamp())
    FROM due WHERE m.mutex = $1
    RETURNING m.owner, m.session, m.token, m.until
), placed AS (
    INSERT INTO {waiter} (mutex, session, contender, channel, watches, until)
    SELECT $1, $3, $2, $4, false, clock_timestamp() + make_interval(secs => $5)
    FROM mutex_row
    -- A session whose contender id already holds the mutex gets no entry.
    WHERE mutex_row.until <= clock_timestamp() OR mutex_row.owner <> $2
    ON CONFLICT (mutex, session) DO UPDATE SET until = excluded.until, channel = excluded.channel
)
SELECT owner, session, token, until, clock_timestamp(), false FROM mutex_row
UNION ALL
SELECT m.owner, m.session, m.token, m.until, clock_timestamp(), true FROM {mutex} m
WHERE m.mutex = $1 AND NOT EXISTS (SELECT FROM mutex_row)
