-- Lets everyone who takes or frees these mutexes tell the channel $2. A row that another transaction has locked is
-- left out, and costs the others nothing. Returns the mutexes that are watched now.
WITH made AS (
    INSERT INTO {mutex} (mutex, owner, session, token, acquired_at, renewed_at, ttl_at, until, watched)
    SELECT n.mutex, '', '', 0, 'epoch', 'epoch', 'epoch', 'epoch', 1
    FROM unnest($1::text[]) AS n (mutex)
    WHERE {bound} true
    -- In the order of their names, so that two handles never wait for each other.
    ORDER BY n.mutex COLLATE "C"
    ON CONFLICT (mutex) DO NOTHING
    RETURNING mutex
), due AS (
    SELECT n.mutex FROM unnest($1::text[]) AS n (mutex)
    CROSS JOIN LATERAL (
        SELECT FROM {mutex} h WHERE h.mutex = n.mutex FOR NO KEY UPDATE SKIP LOCKED) h
), asked AS (
    UPDATE {mutex} m SET watched = abs(m.watched) + 1
    FROM due WHERE m.mutex = due.mutex AND m.mutex = ANY($1::text[])
    RETURNING m.mutex
)
INSERT INTO {waiter} AS w (mutex, session, contender, channel, watches, until)
SELECT o.mutex, $2, '', $2, true, clock_timestamp() + make_interval(secs => $3)
FROM (SELECT mutex FROM made UNION ALL SELECT mutex FROM asked) o
ON CONFLICT (mutex, session) DO UPDATE SET until = excluded.until
RETURNING w.mutex::text
