-- What take and create do, for many mutexes at once. A row that another transaction has locked is left out: it
-- delays nobody, and nobody waits in a circle.
-- The plan may be made while there is one mutex, and used for thousands: so each wish looks for its own row, whatever
-- the planner believes of the table. A part that locks rows is carried out once and by itself, in every version.
WITH wish AS (
    SELECT w.* FROM
        unnest($1::text[], $2::text[], $3::text[], $4::float8[], $5::float8[], $6::bigint[], $7::boolean[])
        AS w (mutex, owner, session, ttl, total, lapsed, takes)
), made AS (
    INSERT INTO {mutex} (mutex, owner, session, token, acquired_at, renewed_at, ttl_at, until)
    SELECT w.mutex, w.owner, w.session, {micros}, clock_timestamp(), clock_timestamp(),
        clock_timestamp() + make_interval(secs => w.ttl),
        clock_timestamp() + make_interval(secs => w.total)
    FROM wish w WHERE {bound} {synced} w.takes ORDER BY w.mutex COLLATE "C"
    ON CONFLICT (mutex) DO NOTHING
    RETURNING session, token
), due AS (
    SELECT w.* FROM wish w CROSS JOIN LATERAL (
        SELECT FROM {mutex} h
        WHERE {bound} {synced} h.mutex = w.mutex AND (
            (h.session = w.session AND h.until > clock_timestamp())
            OR (w.takes AND h.until <= clock_timestamp() AND h.waited <= 0
                AND h.token = (SELECT s.token FROM {mutex} s WHERE s.mutex = h.mutex)))
        FOR NO KEY UPDATE SKIP LOCKED) h
), took AS (
    UPDATE {mutex} m SET
        owner = due.owner,
        session = due.session,
        token = CASE WHEN m.session = due.session AND m.until > clock_timestamp() AND m.token <> due.lapsed
            THEN m.token ELSE greatest(m.token + 1, {micros}) END,
        acquired_at = CASE
            WHEN m.session = due.session AND m.until > clock_timestamp() AND m.token <> due.lapsed
            THEN m.acquired_at ELSE clock_timestamp() END,
        renewed_at = clock_timestamp(),
        ttl_at = clock_timestamp() + make_interval(secs => due.ttl),
        until = clock_timestamp() + make_interval(secs => due.total)
    FROM due WHERE m.mutex = due.mutex AND m.mutex = ANY($1::text[])
    RETURNING m.session, m.token, m.watched
)
SELECT session, token, 0::bigint FROM made
UNION ALL
SELECT session, token, watched FROM took
