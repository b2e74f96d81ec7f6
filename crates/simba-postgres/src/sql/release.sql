-- Releases what each session holds, under its token unless that is negative, and notifies the next waiter.
-- Without a token, a take of the session may still run, sent over a connection that has ended. So a row that is free is
-- changed too: a take that has read the row already then acquires nothing, see take.sql.
WITH due AS (
    SELECT w.mutex, w.session, w.token FROM unnest($1::text[], $2::text[], $3::bigint[]) AS w (mutex, session, token)
    CROSS JOIN LATERAL (
        SELECT FROM {mutex} h
        WHERE h.mutex = w.mutex AND (
            (h.session = w.session AND (w.token < 0 OR h.token = w.token))
            OR (w.token < 0 AND h.until <= clock_timestamp()))
        FOR NO KEY UPDATE SKIP LOCKED) h
    WHERE {unsynced}
)
UPDATE {mutex} m SET {free}
FROM due WHERE m.mutex = due.mutex AND m.mutex = ANY($1::text[])
RETURNING due.session, {notified}, m.watched
