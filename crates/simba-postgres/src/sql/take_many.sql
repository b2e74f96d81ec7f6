-- Does what take does, for many mutexes.
-- The plan may be made with one mutex and used with thousands: so each request finds its own row, whatever the planner
-- assumes about the table. A part that locks rows is executed once and separately, in every version of the server.
WITH due AS (
    SELECT w.*, h.tid FROM
        unnest($1::text[], $2::text[], $3::text[], $4::float8[], $5::float8[], $6::bigint[], $7::boolean[])
        AS w (mutex, owner, session, ttl, total, lapsed, takes)
    CROSS JOIN LATERAL (
        SELECT h.ctid AS tid FROM {mutex} h
        WHERE {synced} AND h.mutex = w.mutex AND (
            (h.session = w.session AND h.until > clock_timestamp())
            OR (w.takes AND h.until <= clock_timestamp() AND h.waited <= 0))
        FOR NO KEY UPDATE SKIP LOCKED) h
)
UPDATE {mutex} m SET {lease}
FROM due WHERE m.mutex = due.mutex AND m.mutex = ANY($1::text[]) AND m.ctid = due.tid
RETURNING m.session, m.token, m.watched, m.waited
