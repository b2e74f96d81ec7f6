-- What free does, for many mutexes at once. A row that another transaction has locked is left out. Each wish looks for
-- its own row, as in take_many.
WITH due AS (
    SELECT w.mutex, w.session, w.token FROM unnest($1::text[], $2::text[], $3::bigint[]) AS w (mutex, session, token)
    CROSS JOIN LATERAL (
        SELECT FROM {mutex} h
        WHERE h.mutex = w.mutex AND (
            (h.session = w.session AND (w.token < 0 OR h.token = w.token))
            OR (w.token < 0 AND h.until <= clock_timestamp()))
        FOR NO KEY UPDATE SKIP LOCKED) h
    WHERE {bound} {unsynced}
)
UPDATE {mutex} m SET owner = '', session = '', ttl_at = 'epoch', until = 'epoch',
    token = m.token + CASE WHEN due.token < 0 AND m.token < 9223372036854775807 THEN 1 ELSE 0 END
FROM due WHERE m.mutex = due.mutex AND m.mutex = ANY($1::text[])
RETURNING due.session, {called}, m.watched
