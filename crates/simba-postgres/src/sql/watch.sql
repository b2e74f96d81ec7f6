-- Makes acquisitions and releases of these mutexes notify the channel $2. Skips rows that another transaction has
-- locked, so that none delays the others. Returns the mutexes that are watched now.
WITH created AS (
    {create}
), due AS (
    SELECT n.mutex FROM unnest($1::text[]) AS n (mutex)
    CROSS JOIN LATERAL (
        SELECT FROM {mutex} h WHERE h.mutex = n.mutex FOR NO KEY UPDATE SKIP LOCKED) h
), updated AS (
    UPDATE {mutex} m SET watched = abs(m.watched) + 1
    FROM due WHERE m.mutex = due.mutex AND m.mutex = ANY($1::text[])
    RETURNING m.mutex
)
INSERT INTO {waiter} AS w (mutex, session, contender, channel, watches, until)
SELECT o.mutex, $2, '', $2, true, clock_timestamp() + make_interval(secs => $3)
FROM (SELECT mutex FROM created UNION ALL SELECT mutex FROM updated) o
ON CONFLICT (mutex, session) DO UPDATE SET until = excluded.until
RETURNING w.mutex::text
