-- Does what take does, for many mutexes. The rows of new ones are created free, and reported with the token zero: the
-- calls are sent again. A call that arrives late, after its session released, so creates nothing that is held.
-- The plan may be made with one mutex and used with thousands: so each request finds its own row, whatever the planner
-- assumes about the table. A part that locks rows is executed once and separately, in every version of the server.
WITH request AS (
    SELECT w.* FROM
        unnest($1::text[], $2::text[], $3::text[], $4::float8[], $5::float8[], $6::bigint[], $7::boolean[])
        AS w (mutex, owner, session, ttl, total, lapsed, takes)
), created AS (
    {create}
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
SELECT session, token, watched, waited FROM took
UNION ALL
SELECT w.session, 0, 0, 0 FROM created c JOIN request w ON w.mutex = c.mutex
