-- Does what take does, for many mutexes, and creates the rows of new ones. Only a row that does not exist is inserted:
-- ON CONFLICT waits for a transaction that changes an existing one.
-- The plan may be made with one mutex and used with thousands: so each request finds its own row, whatever the planner
-- assumes about the table. A part that locks rows is executed once and separately, in every version of the server.
WITH request AS (
    SELECT w.* FROM
        unnest($1::text[], $2::text[], $3::text[], $4::float8[], $5::float8[], $6::bigint[], $7::boolean[])
        AS w (mutex, owner, session, ttl, total, lapsed, takes)
), created AS (
    INSERT INTO {mutex} (mutex, owner, session, token, acquired_at, renewed_at, ttl_at, until)
    SELECT w.mutex, w.owner, w.session, {micros}, clock_timestamp(), clock_timestamp(),
        clock_timestamp() + make_interval(secs => w.ttl),
        clock_timestamp() + make_interval(secs => w.total)
    FROM request w
    WHERE {synced} AND w.takes AND NOT EXISTS (SELECT FROM {mutex} e WHERE e.mutex = w.mutex)
    -- Ordered by name, so that two handles cannot deadlock.
    ORDER BY w.mutex COLLATE "C"
    ON CONFLICT (mutex) DO NOTHING
    RETURNING session, token
), due AS (
    SELECT w.* FROM request w CROSS JOIN LATERAL (
        SELECT FROM {mutex} h
        WHERE {synced} AND h.mutex = w.mutex AND (
            (h.session = w.session AND h.until > clock_timestamp())
            OR (w.takes AND h.until <= clock_timestamp() AND h.waited <= 0 AND {unchanged}))
        FOR NO KEY UPDATE SKIP LOCKED) h
), took AS (
    UPDATE {mutex} m SET {lease} FROM due WHERE m.mutex = due.mutex AND m.mutex = ANY($1::text[])
    RETURNING m.session, m.token, m.watched, m.waited
)
SELECT session, token, 0::bigint, 0::bigint FROM created
UNION ALL
SELECT session, token, watched, waited FROM took
