-- Frees what the session has, under the token $3 if that is not negative, and wakes the next waiter.
-- Without a token, a take of the session may still be waiting for the row, over a connection that has ended. So the
-- token of a row that is free, or that this statement frees, is raised: such a take then takes nothing.
UPDATE {mutex} m SET owner = '', session = '', ttl_at = 'epoch', until = 'epoch',
    token = m.token + CASE WHEN $3 < 0 AND m.token < 9223372036854775807 THEN 1 ELSE 0 END
FROM (SELECT $2::text AS session WHERE {unsynced}) due
WHERE {bound} m.mutex = $1 AND (
    (m.session = due.session AND ($3 < 0 OR m.token = $3))
    OR ($3 < 0 AND m.until <= clock_timestamp()))
RETURNING due.session, {called}, m.watched
