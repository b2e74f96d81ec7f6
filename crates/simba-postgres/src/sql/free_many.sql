-- What free does, for many mutexes at once. A row that another transaction has locked is left out. Each wish looks for
-- its own row, as in take_many.
WITH due AS (
    SELECT w.mutex, w.session FROM unnest($1::text[], $2::text[], $3::bigint[]) AS w (mutex, session, token)
    CROSS JOIN LATERAL (
        SELECT FROM {mutex} h
        WHERE h.mutex = w.mutex AND h.session = w.session AND (w.token < 0 OR h.token = w.token)
        FOR NO KEY UPDATE SKIP LOCKED) h
    WHERE {bound} {unsynced}
)
UPDATE {mutex} m SET owner = '', session = '', ttl_at = 'epoch', until = 'epoch'
FROM due WHERE m.mutex = due.mutex AND m.mutex = ANY($1::text[])
RETURNING due.session, {called}, m.watched
