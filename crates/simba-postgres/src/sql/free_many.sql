-- What free does, for many mutexes at once. A row that another transaction has locked is left out.
UPDATE {mutex} m SET owner = '', session = '', ttl_at = 'epoch', until = 'epoch'
FROM (
    SELECT w.mutex, w.session FROM unnest($1::text[], $2::text[], $3::bigint[]) AS w (mutex, session, token)
    JOIN {mutex} h ON h.mutex = w.mutex AND h.session = w.session AND (w.token < 0 OR h.token = w.token)
    WHERE {bound} {unsynced}
    FOR NO KEY UPDATE OF h SKIP LOCKED
) due
WHERE m.mutex = due.mutex
RETURNING due.session, {called}, m.watched
