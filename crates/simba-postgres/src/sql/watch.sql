-- Lets everyone who takes or frees these mutexes tell the channel $2. Kept in the order of their names, so that
-- two handles never wait for each other.
WITH asked AS (
    INSERT INTO {mutex} AS m (mutex, owner, session, token, acquired_at, renewed_at, ttl_at, until, watched)
    SELECT n.mutex, '', '', 0, 'epoch', 'epoch', 'epoch', 'epoch', 1
    FROM unnest($1::text[]) AS n (mutex)
    WHERE {bound} true
    ORDER BY n.mutex COLLATE "C"
    ON CONFLICT (mutex) DO UPDATE SET watched = abs(m.watched) + 1
    RETURNING m.mutex
)
INSERT INTO {waiter} (mutex, session, contender, channel, watches, until)
SELECT asked.mutex, $2, '', $2, true, statement_timestamp() + make_interval(secs => $3) FROM asked
ON CONFLICT (mutex, session) DO UPDATE SET until = excluded.until
