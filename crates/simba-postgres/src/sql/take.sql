-- Renews the mutex if the session holds it. With $7, acquires a free mutex without waiters. $6 is the lapsed token.
WITH due AS (
    SELECT $2::text AS owner, $3::text AS session, $4::float8 AS ttl, $5::float8 AS total, $6::bigint AS lapsed
    FROM {mutex} h WHERE {synced} AND h.mutex = $1 AND (
        (h.session = $3 AND h.until > clock_timestamp())
        OR ($7 AND h.until <= clock_timestamp() AND h.waited <= 0 AND {unchanged}))
    FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE {mutex} m SET {lease} FROM due WHERE m.mutex = $1
RETURNING m.session, m.token, m.watched, m.waited
