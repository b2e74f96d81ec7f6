-- Notes that nobody waits ($2) or watches ($3) any more, unless the queue changed since those numbers were read.
WITH old AS (
    SELECT w.session FROM {waiter} w
    WHERE w.mutex = $1 AND w.until <= clock_timestamp() FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM {waiter} d USING old WHERE d.mutex = $1 AND d.session = old.session
)
UPDATE {mutex} m SET
    waited = CASE WHEN m.waited = $2 AND NOT EXISTS (
        SELECT FROM {waiter} w WHERE w.mutex = $1 AND NOT w.watches AND w.until > clock_timestamp())
        THEN -m.waited ELSE m.waited END,
    watched = CASE WHEN m.watched = $3 AND NOT EXISTS (
        SELECT FROM {waiter} w WHERE w.mutex = $1 AND w.watches AND w.until > clock_timestamp())
        THEN -m.watched ELSE m.watched END
WHERE {bound} m.mutex = $1 AND ((m.waited > 0 AND m.waited = $2) OR (m.watched > 0 AND m.watched = $3))
