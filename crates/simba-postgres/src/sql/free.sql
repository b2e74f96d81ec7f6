-- Frees what the session has, under the token $3 if that is not negative, and wakes the next waiter.
UPDATE {mutex} m SET owner = '', session = '', ttl_at = 'epoch', until = 'epoch'
FROM (SELECT $2::text AS session WHERE {unsynced}) due
WHERE {bound} m.mutex = $1 AND m.session = due.session AND ($3 < 0 OR m.token = $3)
RETURNING due.session, {called}, m.watched
