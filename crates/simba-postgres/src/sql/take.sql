-- Renews the mutex if the session holds it. With $7, acquires a free mutex without waiters. $6 is the lapsed token.
-- The locked row is found by its ctid. The ctid of a row that changed after the statement began is not visible to the
-- statement, so that such a row is not written: the session may have released meanwhile. That is a subquery, because a
-- join with the locked rows costs the server a fifth more.
UPDATE {mutex} m SET {lease}
FROM (SELECT $2::text AS owner, $3::text AS session, $4::float8 AS ttl, $5::float8 AS total, $6::bigint AS lapsed) due
WHERE m.ctid = (
    SELECT h.ctid FROM {mutex} h WHERE {synced} AND h.mutex = $1 AND (
        (h.session = $3 AND h.until > clock_timestamp())
        OR ($7 AND h.until <= clock_timestamp() AND h.waited <= 0))
    FOR NO KEY UPDATE SKIP LOCKED)
RETURNING m.session, m.token, m.watched, m.waited
