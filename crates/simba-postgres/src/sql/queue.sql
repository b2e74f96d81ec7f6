-- Makes the mutex and takes it if nobody ever used it; else keeps our place in the queue and tells who has it.
-- Under the lock of the row: who frees it later sees that the queue changed, who freed it before is seen here.
-- A lease that seems to begin in the future is one of before a step back of the server's clock: it ends its own
-- length from now, which is no earlier than its holder believes. The time is read after the row was locked: the
-- holder may have renewed while this statement waited, and its lease must not become shorter by that.
WITH asked AS (
    INSERT INTO {mutex} AS m (mutex, owner, session, token, acquired_at, renewed_at, ttl_at, until)
    SELECT $1, $2, $3, {micros}, clock_timestamp(), clock_timestamp(),
        clock_timestamp() + make_interval(secs => $4), clock_timestamp() + make_interval(secs => $5)
    WHERE {bound} {synced} true
    ON CONFLICT (mutex) DO UPDATE SET
        waited = CASE WHEN m.until > clock_timestamp() AND m.owner = excluded.owner THEN m.waited
            ELSE abs(m.waited) + 1 END,
        until = least(m.until, clock_timestamp() + (m.until - m.renewed_at)),
        renewed_at = least(m.renewed_at, clock_timestamp())
    RETURNING m.owner, m.session, m.token, m.until
), placed AS (
    INSERT INTO {waiter} (mutex, session, contender, channel, watches, until)
    SELECT $1, $3, $2, $6, false, clock_timestamp() + make_interval(secs => $7)
    FROM asked
    -- A twin, whose id has the mutex already, gets no place.
    WHERE asked.until <= clock_timestamp() OR asked.owner <> $2
    ON CONFLICT (mutex, session) DO UPDATE SET until = excluded.until, channel = excluded.channel
)
SELECT owner, session, token, until, clock_timestamp() FROM asked
